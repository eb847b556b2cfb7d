"""Reads a trained model for ``serve.commands.import_model``, in a process of its own with torch.

    echo '{"source": …, "target": …, …}' | python -m serve.lane.reader serve.lane.model_importing

Weights are read by `torch.load(weights_only=True)`, which runs no code that a file brings. The
factory's code does run, as it will when the model is served.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from serve.errors import ConfigError, ServeError
from serve.lane.example_declaration import declare
from serve.lane.models.calling import method_of, required_parameters
from serve.lane.models.loader import build_model
from serve.lane.pickles import read_pickle
from serve.models.import_messages import ReadModel, ReadOrder

#: Keys under which checkpoints hold the state dict.
_STATE_KEYS = ("state_dict", "model_state_dict", "model_state", "model", "net", "module", "weights")
#: Prefixes that wrappers put before every name: DataParallel, torch.compile.
_WRAPPERS = ("module.", "_orig_mod.")
_FP32 = torch.float32


def main() -> None:
    """Read the order from stdin, carry it out, and write what was found to stdout."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=ReadOrder)
    with redirect_stdout(sys.stderr):  # a factory may print
        try:
            found = read_model(order)
        except ServeError as error:
            found = ReadModel(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found))


def read_model(order: ReadOrder) -> ReadModel:
    """Convert the weights, and ask forward for its parameters; raises ServeError."""
    tensors, notes = convert(Path(order.source), Path(order.target), order.strip)
    forward: tuple[str, ...] = ()
    declaration = ""
    if order.spec is not None:
        module = build_model(order.spec)
        if order.example:
            declaration, told = declare(module, order.spec, Path(order.example))
            notes += told
        else:
            forward = required_parameters(method_of(module, order.spec))
    return ReadModel(tensors=tensors, notes=notes, forward=forward, declaration=declaration)


def convert(source: Path, target: Path, strip: str = "") -> tuple[int, tuple[str, ...]]:
    """Write the weights in `source` to `target` as safetensors in FP32.

    Tensors that share memory are written once each. Returns their number, and notes on what was
    changed. Raises ConfigError for a file that holds anything but tensors.
    """
    state = _read_safetensors(source) if source.suffix == ".safetensors" else _pickled_state(source)
    notes: list[str] = []
    for wrapper in (*_WRAPPERS, strip):
        if wrapper and state and all(name.startswith(wrapper) for name in state):
            state = {name.removeprefix(wrapper): tensor for name, tensor in state.items()}
            notes.append(f"'{wrapper}' was removed from the names")
    widened = Counter(
        str(tensor.dtype).removeprefix("torch.")
        for tensor in state.values()
        if tensor.is_floating_point() and tensor.dtype != _FP32
    )
    for name, tensor in state.items():
        if tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided:
            raise ConfigError(
                f"{source}: tensor '{name}' is {tensor.dtype} ({tensor.layout}); weights are dense"
                " and real"
            )
    notes += [f"{count} tensors of {name} became float32" for name, count in widened.items()]
    kept = {
        name: tensor.detach().to(_FP32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in state.items()
    }
    shared = len(state) - len({tensor.data_ptr() for tensor in state.values() if tensor.numel()})
    shared -= sum(not tensor.numel() for tensor in state.values())
    if shared > 0:
        notes.append(f"{shared} tensors that share memory with others were written out")
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, target)
    return len(kept), tuple(notes)


def _pickled_state(source: Path) -> dict[str, torch.Tensor]:
    advice = "Save the state dict alone: torch.save(model.state_dict(), …)"
    return _state_of(read_pickle(source, "weights", advice), source)


def _state_of(found: Any, source: Path) -> dict[str, torch.Tensor]:
    """Return the state dict in what a file held; raises ConfigError."""
    if isinstance(found, Mapping):
        for held in (found, *(found.get(key) for key in _STATE_KEYS)):
            if isinstance(held, Mapping) and held and _is_state(held):
                return dict(held)
        if not found:  # a model without parameters
            return {}
    keys = ", ".join(map(str, list(found)[:8])) if isinstance(found, Mapping) else "no names"
    raise ConfigError(
        f"{source}: holds no state dict, that is tensors by name; it holds a"
        f" {type(found).__name__} with {keys}"
    )


def _is_state(held: Mapping[Any, Any]) -> bool:
    return all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in held.items())


def _read_safetensors(source: Path) -> dict[str, torch.Tensor]:
    """Return all tensors, also those that `save_model` left out because they share memory."""
    try:
        with safe_open(source, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            left_out: Mapping[str, str] = file.metadata() or {}
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: does not exist") from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{source}: cannot be read as safetensors: {error}") from error
    same = {name: state[of] for name, of in left_out.items() if of in state and name not in state}
    return state | same
