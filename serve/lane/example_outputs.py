"""Finds the outputs of a model by two runs on random graphs: a size that changes is a symbol's."""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from serve.errors import ModelError
from serve.graphs.random_inputs import declared_inputs
from serve.interface import DTYPES, InputSlot, Interface, TensorSlot
from serve.lane.models.declared import DeclaredForward

_WIRES = {name: wire for wire, name in DTYPES.items()}
#: Counts of the symbols in two runs, and of the graphs in them: all different.
_PRIMES = (
    (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179),
    (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281, 283, 293),
)
_GRAPHS = 3, 5


def typed_key(kind: object) -> str:
    """Return the name of a type of nodes, or of edges, as names of inputs hold it."""
    return "__".join(map(str, kind)) if isinstance(kind, tuple) else str(kind)


def tensors_of(returned: object, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield a name and each tensor of what forward returns; raises ModelError."""
    if isinstance(returned, Tensor):
        yield name, returned
    elif isinstance(returned, Mapping):
        for key, value in returned.items():
            yield from tensors_of(value, typed_key(key))
    elif isinstance(returned, tuple | list):
        numbers = (f"{name}{position}" for position in range(len(returned)))
        for part, value in zip(getattr(returned, "_fields", numbers), returned, strict=True):
            if value is not None:
                yield from tensors_of(value, part)
    else:
        raise ModelError(f"forward returned a {type(returned).__name__}")


def outputs_of(module: nn.Module, slots: tuple[InputSlot, ...]) -> tuple[TensorSlot, ...]:
    """Return the outputs by what the module returns for two random graphs.

    Raises ModelError for what no output can be, and what the module raises.
    """
    interface = Interface(slots, ())
    forward = DeclaredForward(module, interface, "the example")
    runs = []
    for primes, graphs in zip(_PRIMES, _GRAPHS, strict=True):
        counts = (
            graphs if symbol in interface.divided else prime
            for symbol, prime in zip(interface.counts, primes, strict=False)
        )
        arrays = declared_inputs(
            interface,
            counts,
            np.random.default_rng(0),
            graphs=partial(_batch, graphs),
        )
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        sizes = forward.sizes(tensors)
        with torch.inference_mode():
            found = dict(tensors_of(forward.returned(module, tensors, sizes)))
        runs.append((sizes, found))
    (sizes, first), (others, second) = runs
    by_sizes = {(count, others[symbol]): symbol for symbol, count in sizes.items()}
    return tuple(
        TensorSlot(
            name,
            _datatype(name, tensor),
            tuple(
                _dim(name, one, by_sizes)
                for one in zip(tensor.shape, second[name].shape, strict=True)
            ),
        )
        for name, tensor in first.items()
    )


def _datatype(name: str, tensor: Tensor) -> str:
    """Return the wire's name of an output's dtype; raises ModelError for one that it lacks."""
    found = _WIRES.get(str(tensor.dtype).removeprefix("torch."))
    if found is None:
        raise ModelError(
            f"forward returned {tensor.dtype} as '{name}'; outputs are {', '.join(_WIRES)}"
        )
    return found


def _batch(graphs: int, things: int) -> NDArray[np.int64]:
    """Return the graph of each of `things`."""
    return np.arange(things) * graphs // max(things, 1)


def _dim(name: str, both: tuple[int, int], by_sizes: Mapping[tuple[int, int], str]) -> int | str:
    """Return an output's size: a symbol, or a number that is the same in both runs."""
    if both in by_sizes:
        return by_sizes[both]
    if both[0] == both[1]:
        return both[0]
    raise ModelError(
        f"output '{name}' has {both[0]} and {both[1]} rows or columns in two runs, which"
        " no count of the inputs tells; declare it in a file: --declaration FILE"
    )
