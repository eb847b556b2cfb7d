"""`gnnserve import`: bring a trained model into a repository, and try it.

The model's folder is made beside the repository's models, under a name that no server reads, and
moved to its place once the model has run. So a failed import leaves nothing.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from serve.commands.torch_reader import read_apart
from serve.errors import ConfigError, ModelError
from serve.inputs import INPUTS, Size
from serve.interface import InputSlot
from serve.models.import_messages import ReadModel, ReadOrder
from serve.models.model_config import CONFIG_FILE
from serve.models.model_signature import Signature
from serve.models.repository import WEIGHTS_FILE, ModelSpec, find
from serve.models.wrappers import wrapper
from serve.progress import Progress
from serve.server.trial import Trials
from serve.toml_tables import read_toml, toml_readings

#: Names under which others keep weights in a folder, the first that exists being read.
_HUB_WEIGHTS = ("model.safetensors", "model.pth", "pytorch_model.bin")
_MLFLOW_WEIGHTS = ("state_dict.pth", "extra_files/state_dict.pth", "data/model.pth")
#: Types of the factory's arguments.
_PLAIN = (bool, int, float, str, list)
#: How to declare what `--inputs` cannot tell.
_BY_EXAMPLE = "give a graph that it takes, saved by torch.save(data, FILE): --example FILE"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A trained model, as its author has it."""

    #: `file.py:callable`, or `package.module:callable`.
    factory: str
    #: File of its weights: .pt, .pth, .bin or .safetensors.
    weights: Path
    #: Keyword arguments of the factory.
    args: dict[str, Any] = {}
    #: Method to call instead of forward, and its arguments that no request brings.
    method: str = "forward"
    method_args: dict[str, Any] = {}
    #: Tensors passed to forward, by position; empty for its required parameters.
    inputs: tuple[str, ...] = ()
    #: TOML with `[[model.input]]` and `[[model.output]]`, instead of `inputs`; empty for none.
    declaration: str = ""
    #: A graph of PyG that `torch.save` wrote, to declare the inputs by; None for none.
    example: Path | None = None
    #: Prefix to remove from the names of the weights.
    strip: str = ""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was imported and has run."""

    spec: ModelSpec
    signature: Signature
    tensors: int
    #: What was changed on the way, in sentences.
    notes: tuple[str, ...]


def read_model_apart(order: ReadOrder) -> ReadModel:
    """Have a process with torch convert the weights; raises ModelError when it does not end."""
    return read_apart("serve.lane.model_importing", order, order.source, ReadModel)


def import_model(
    root: Path,
    name: str,
    source: Source,
    progress: Progress,
    *,
    read: Callable[[ReadOrder], ReadModel] = read_model_apart,
    trial: Callable[[ModelSpec], Signature] | None = None,
) -> Imported:
    """Bring `source` into the repository `root` as the newest version of model `name`.

    A process that has torch may `read` and try by itself; otherwise others do. Raises ConfigError
    for what cannot be imported, and ModelError for a model that does not run.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name: '{name}' has more than letters, digits and '_', '-', '.'")
    try:
        root.mkdir(parents=True, exist_ok=True)
        # A repository's reader skips names that begin with a dot.
        staging = Path(tempfile.mkdtemp(prefix=".import-", dir=root))
    except OSError as error:
        raise ConfigError(f"--repository: {root}: {error.strerror}") from error
    try:
        with ExitStack() as stack:
            tried = trial or stack.enter_context(Trials()).run
            return _import(root, staging, name, source, progress, read, tried)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _import(
    root: Path,
    staging: Path,
    name: str,
    source: Source,
    progress: Progress,
    read_model: Callable[[ReadOrder], ReadModel],
    trial: Callable[[ModelSpec], Signature],
) -> Imported:
    folder, kept = staging / name, root / name
    version = 1 + max((int(e.name) for e in kept.glob("[1-9]*") if e.name.isdigit()), default=0)
    weights = folder / str(version) / WEIGHTS_FILE
    weights.parent.mkdir(parents=True)
    factory = _copy_factory(source.factory, folder)
    progress("reading the weights", 0.1)
    planned = ModelSpec(
        name=name,
        version=version,
        folder=str(folder),
        factory=factory,
        args=source.args,
        method=source.method,
        method_args=source.method_args,
        inputs=source.inputs,
        qos_factor=None,
        weights=str(weights),
        weights_bytes=0,
    )
    told = source.inputs or source.declaration
    read = read_model(
        ReadOrder(
            source=str(source.weights),
            target=str(weights),
            strip=source.strip,
            spec=None if told else planned,
            example="" if source.example is None else str(source.example),
        )
    )
    if read.error:
        raise ConfigError(read.error)
    if source.example is None:
        inputs = source.inputs if told else _inputs_of(read.forward, source)
    else:
        inputs, source = (), msgspec.structs.replace(source, declaration=read.declaration)
    config = _config(factory, source, inputs)
    (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
    _require_same(folder, kept)
    progress("running it on small graphs", 0.5)
    try:
        signature = trial(find(staging, name, str(version)))
    except ModelError as error:
        told = str(error).replace(str(folder), str(kept))
        if "no probe graph runs" in told and not source.declaration:
            told += f"; if forward takes or returns other tensors, {_BY_EXAMPLE}"
        raise ModelError(told) from error
    _move(folder, kept, version)
    return Imported(
        spec=find(root, name, str(version)),
        signature=signature,
        tensors=read.tensors,
        notes=read.notes,
    )


# -- where models come from -----------------------------------------------------------------------


def hub_source(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return weights and arguments in a folder that `save_pretrained` wrote.

    Raises ConfigError when it holds no weights.
    """
    config = folder / "config.json"
    arguments: dict[str, Any] = {}
    if config.is_file():
        try:
            found = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{config}: no JSON: {error}") from error
        if isinstance(found, dict):
            arguments = {key: value for key, value in found.items() if isinstance(value, _PLAIN)}
    return _first_of(folder, _HUB_WEIGHTS), arguments


def mlflow_source(folder: Path) -> Path:
    """Return the weights in a folder that MLflow wrote; raises ConfigError without any."""
    return _first_of(folder, _MLFLOW_WEIGHTS)


def read_declaration(path: Path) -> str:
    """Return the text of a file with `[[model.input]]` and `[[model.output]]` alone.

    Raises ConfigError for a file with other keys, as it would change the model's configuration.
    """
    table = read_toml(path)
    others = [*(key for key in table if key != "model"), *table.get("model", {})]
    others = [key for key in others if key not in ("input", "output")]
    if others or "model" not in table:
        told = ", ".join(others) or "nothing"
        raise ConfigError(
            f"{path}: holds {told}; a declaration is [[model.input]] and [[model.output]] alone"
        )
    return path.read_text(encoding="utf-8")


def parse_arguments(given: Sequence[str], option: str = "--args") -> dict[str, Any]:
    """Return `key=value` arguments; a value is a TOML value, or else text. Raises ConfigError."""
    arguments = {}
    for text in given:
        key, mark, value = text.partition("=")
        if not mark or not key.isidentifier():
            raise ConfigError(f"{option}: '{text}' is not key=value")
        found = (toml_readings(value) or [value])[0]
        if not isinstance(found, _PLAIN):
            raise ConfigError(
                f"{option}: '{text}': a value is a number, text, true, false or a list"
            )
        arguments[key] = found
    return arguments


def _first_of(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{folder}: holds no weights; looked for {', '.join(names)}")


# -- the model's folder ---------------------------------------------------------------------------


def _copy_factory(factory: str, folder: Path) -> str:
    """Copy the factory's file into `folder`; return the factory as a configuration names it."""
    file, _, attribute = factory.rpartition(":")
    if not attribute.isidentifier():
        raise ConfigError(f"--factory: '{factory}' is neither file.py:callable nor module:callable")
    if not file.endswith(".py"):
        return factory
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"--factory: {path}: no such file")
    shutil.copyfile(path, folder / path.name)
    return f"./{path.name}:{attribute}"


def _inputs_of(parameters: Sequence[str], source: Source) -> tuple[str, ...]:
    """Return the required parameters of forward as inputs; raises ConfigError for an unknown."""
    if tuple(parameters) == ("data",):
        raise ConfigError(
            f"--inputs: {source.method} of {source.factory} takes a Data; say which of"
            f" {', '.join(INPUTS)} it holds: --inputs x,edge_index; or {_BY_EXAMPLE}"
        )
    unknown = [name for name in parameters if name not in INPUTS]
    if unknown or not parameters:
        taken = ", ".join(parameters) or "none"
        usual = (
            f"say which of {', '.join(INPUTS)} each one is, in their order: --inputs x,edge_index;"
            f" or {_BY_EXAMPLE}"
        )
        raise ConfigError(
            f"--inputs: the required parameters of {source.factory}'s {source.method} are {taken};"
            f" {wrapper(source.factory, source.method, parameters) or usual}"
        )
    return tuple(parameters)


def _config(factory: str, source: Source, inputs: Sequence[str]) -> str:
    lines = ["[model]", f"factory = {_toml(factory)}"]
    if source.method != "forward":
        lines.append(f"method = {_toml(source.method)}")
    if inputs:
        lines.append(f"inputs = {_toml(list(inputs))}")
    for section, values in (("args", source.args), ("method_args", source.method_args)):
        if values or section == "args":
            lines += ["", f"[model.{section}]", *(f"{k} = {_toml(v)}" for k, v in values.items())]
    declaration = source.declaration.strip()
    return "\n".join(lines) + "\n" + (f"\n{declaration}\n" if declaration else "")


def _toml(value: Any) -> str:
    """Return a TOML value; JSON's text, numbers, booleans and lists are TOML's."""
    return json.dumps(value, ensure_ascii=False)


def _require_same(folder: Path, kept: Path) -> None:
    """Raise ConfigError when model `kept` exists and another version of it has other code."""
    for path in (p for p in folder.iterdir() if p.is_file() and kept.is_dir()):
        there = kept / path.name
        if not there.is_file() or there.read_bytes() != path.read_bytes():
            raise ConfigError(
                f"{there}: the model exists with another {path.name}; choose another --name, or"
                " remove its folder"
            )


def _move(folder: Path, kept: Path, version: int) -> None:
    """Move the model's folder, or its new version, to where servers read it."""
    try:
        if kept.is_dir():
            os.rename(folder / str(version), kept / str(version))
        else:
            os.rename(folder, kept)
    except OSError as error:
        raise ConfigError(f"{kept}: cannot be written: {error.strerror}") from error


# -- what to tell ---------------------------------------------------------------------------------


def client_snippet(found: Imported, target: str = "127.0.0.1:8001") -> str:
    """Return a program that asks a server for the imported model."""
    given = ",\n".join(f"        {argument}" for argument in _arguments(found))
    name = json.dumps(found.spec.name)
    return (
        "import numpy as np\n"
        "from gnnserve import Client\n\n"
        f'with Client("{target}") as client:\n'
        f"    answer = client.infer(\n        {name},\n{given},\n    )\n"
        "for name, array in answer.outputs.items():\n"
        "    print(name, array.shape)\n"
    )


def _arguments(found: Imported) -> list[str]:
    """Return the arguments of `infer` for a small graph, as source code."""
    signature, interface = found.signature, found.spec.interface
    if interface is not None:
        counts = interface.sizes(
            interface.spread(3 * len(interface.nodes), 2 * len(interface.counts))
        )
        arrays = (
            f"            {json.dumps(slot.name)}: np.full({slot.shape_for(counts)},"
            f" {_lowest(slot)}, np.{_numpy(slot.dtype)}),\n"
            for slot in interface.inputs
        )
        return ["{\n" + "".join(arrays) + "        }"]
    sizes: dict[Size, int] = {"N": 3, "E": 2, "G": 1, "F": signature.num_features}
    sizes["D"] = signature.edge_dim or 0
    return [
        f"{name}=np.zeros({INPUTS[name].shape_of(sizes)}, np.{INPUTS[name].dtype})"
        for name in found.spec.inputs
    ]


def _lowest(slot: InputSlot) -> str:
    """Return the least value that the input may have, exactly, as source code, or its columns."""
    if slot.columns:
        return str([low for low, _ in slot.columns])
    low = slot.low or 0
    return str(int(low)) if low == int(low) else repr(low)


def _numpy(dtype: str) -> str:
    """Return numpy's name of a dtype as an attribute."""
    return "bool_" if dtype == "bool" else dtype
