"""Writes a model into a repository atomically: a reader never sees half a file.

See ``repository`` for the format.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from serve.models.model_config import CONFIG_FILE
from serve.models.repository import WEIGHTS_FILE


def write_model(
    root: Path,
    name: str,
    module: torch.nn.Module,
    *,
    factory: str,
    args: Mapping[str, bool | int | float | str],
    inputs: tuple[str, ...] = ("x", "edge_index"),
    declaration: str = "",
    version: int = 1,
    description: str = "",
) -> Path:
    """Save `module` as version `version` of model `name` under `root`; return its folder.

    `factory` and `args` must rebuild the module. `declaration` is `[[model.input]]` and
    `[[model.output]]` as TOML, instead of `inputs`. An existing version is replaced; processes that
    mapped it keep the old weights.
    """
    folder = root / name
    config = "\n".join(
        [
            "[model]",
            f"factory = {json.dumps(factory)}",
            *([] if declaration else [f"inputs = {json.dumps(inputs)}"]),
            f"description = {json.dumps(description, ensure_ascii=False)}",
            "",
            "[model.args]",
            *(f"{key} = {json.dumps(value)}" for key, value in args.items()),
            "",
            declaration,
        ]
    )
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    _replace(folder / str(version) / WEIGHTS_FILE, save(_state(module)))
    # The config comes last: a folder without it is not a model yet.
    _replace(folder / CONFIG_FILE, config.encode())
    return folder


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's state, with a copy for each name of a tensor that has several."""
    seen: set[int] = set()
    state = {}
    for name, tensor in module.state_dict().items():
        state[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return state


def _replace(path: Path, data: bytes) -> None:
    """Replace the content of `path` in one step, by renaming a complete file onto it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
