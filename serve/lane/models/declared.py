"""Run a model by the inputs and outputs that it declares.

Arguments are passed by name where forward has parameters of these names. Otherwise, or where it
takes any (`*args`), they go by position in the order of the declaration. Names with a dot are
entries of a dict: `x.author` and `x.paper` make the argument `x_dict` or `x`, and
`edge_index.author__writes__paper` is the entry of the edge type ("author", "writes", "paper").
Numbers from 0 on are places in a tuple: `x.0` and `x.1` make the argument `x`, a pair of features
of sources and of targets.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from serve.errors import InvalidInput, ModelError
from serve.interface import InputSlot, Interface, TensorSlot

Inputs = Mapping[str, Tensor]
Outputs = tuple[Tensor, ...]
#: Each symbol's count in a request.
Sizes = Mapping[str, int]
#: Joins the parts of an edge type in a name.
_TYPES = "__"


class DeclaredForward:
    """Calls a module with declared inputs and checks what it returns."""

    def __init__(self, module: torch.nn.Module, interface: Interface, key: str) -> None:
        """Find the arguments of the module's forward.

        Raises ModelError, naming the model as `key`, when they do not fit the declaration.
        """
        self.interface = interface
        self._key = key
        by_argument: dict[str, list[InputSlot]] = {}
        for slot in interface.inputs:
            by_argument.setdefault(slot.name.partition(".")[0], []).append(slot)
        names, open_ended = _parameters(module.forward)
        #: Argument's name in forward, or None to pass it by position; and its inputs.
        self._arguments: list[tuple[str | None, list[InputSlot]]] = []
        found = {base: _named(base, slots, names) for base, slots in by_argument.items()}
        if open_ended:
            found = {
                base: name or (f"{base}_dict" if _by_type(by_argument[base]) else base)
                for base, name in found.items()
            }
        by_name = all(found.values())
        if not by_name and not open_ended and names is not None and len(by_argument) > len(names):
            raise ModelError(
                f"model {key}: forward takes {', '.join(names) or 'nothing'}, but the declared"
                f" inputs are {', '.join(by_argument)}"
            )
        for base, slots in by_argument.items():
            self._arguments.append((found[base] if by_name else None, slots))

    def sizes(self, inputs: Inputs) -> dict[str, int]:
        """Return each symbol's count in a request; raises InvalidInput where two disagree."""
        for slot in self.interface.inputs:
            if not slot.optional and slot.name not in inputs:
                raise InvalidInput(f"model '{self._key}' needs the tensor '{slot.name}'")
        counts = self.interface.counts_of({name: tuple(t.shape) for name, t in inputs.items()})
        sizes = dict(zip(self.interface.counts, counts, strict=True))
        self.interface.graph_counts(self.interface.largest(inputs), sizes)
        return sizes

    def __call__(
        self, module: torch.nn.Module, inputs: Inputs, sizes: Sizes | None = None
    ) -> Outputs:
        """Run forward, and return the outputs in the order of the declaration.

        `sizes` are those of the inputs, where they are known: to find them out on a device would
        wait for it. Raises ModelError when the outputs are not as declared; errors of forward pass
        through.
        """
        if sizes is None:
            sizes = self.sizes(inputs)
        return self._checked(self.returned(module, inputs, sizes), sizes)

    def returned(self, module: torch.nn.Module, inputs: Inputs, sizes: Sizes) -> object:
        """Return what forward returns, unchecked."""
        by_position: list[Any] = []
        by_name: dict[str, Any] = {}
        for name, slots in self._arguments:
            value = self._argument(name, slots, inputs, sizes)
            if name is None:
                by_position.append(value)
            else:
                by_name[name] = value
        return module(*by_position, **by_name)

    def _argument(
        self, name: str | None, slots: Sequence[InputSlot], inputs: Inputs, sizes: Sizes
    ) -> Any:
        values = {slot.name: filled(slot, inputs, sizes) for slot in slots}
        if "." not in slots[0].name:
            return values[slots[0].name]
        entries = {key.partition(".")[2]: value for key, value in values.items()}
        return _dict(entries) if name == f"{_base(slots)}_dict" else _dict_or_tuple(entries)

    def _checked(self, returned: object, sizes: Sizes) -> Outputs:
        found = list(self._flat(returned))
        slots = self.interface.outputs
        if len(found) != len(slots):
            raise ModelError(
                f"model {self._key}: forward returned {len(found)} tensors; declared are"
                f" {', '.join(slot.name for slot in slots)}"
            )
        for tensor, slot in zip(found, slots, strict=True):
            shape = slot.shape_for(sizes)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype != slot.dtype or tuple(tensor.shape) != shape:
                raise ModelError(
                    f"model {self._key}: output '{slot.name}' is {dtype} {list(tensor.shape)};"
                    f" declared is {slot.dtype} {_shape(slot)}, here {list(shape)}"
                )
        return tuple(tensor.contiguous() for tensor in found)

    def _flat(self, returned: object) -> Iterator[Tensor]:
        """Yield the tensors of a tuple, of a tuple in it, or of a dict by the declared names."""
        if isinstance(returned, Tensor) and returned.layout == torch.strided:
            yield returned
        elif isinstance(returned, tuple | list):
            # A layer that was left out returns None in its place.
            for one in returned:
                if one is not None:
                    yield from self._flat(one)
        elif isinstance(returned, Mapping):
            entries = {_joined(key): value for key, value in returned.items()}
            for slot in self.interface.outputs:
                key = slot.name if slot.name in entries else slot.name.partition(".")[2]
                if key in entries:
                    yield from self._flat(entries[key])
        else:
            what = type(returned).__name__
            if isinstance(returned, Tensor):
                what = f"tensor that is not dense ({returned.layout})"
            raise ModelError(
                f"model {self._key}: forward returned a {what}; it must return"
                " a dense tensor, or a tuple or dict of them"
            )


def filled(slot: InputSlot, inputs: Inputs, sizes: Sizes) -> Tensor | None:
    """Return an input, or its default where the request has left it out."""
    value = inputs.get(slot.name)
    if value is not None or slot.default is None:
        return value
    device = next(iter(inputs.values())).device
    dtype = getattr(torch, slot.dtype)
    return torch.full(slot.shape_for(sizes), slot.default, dtype=dtype, device=device)


def join(forward: DeclaredForward, graphs: Sequence[Inputs], sizes: Sequence[Sizes]) -> Inputs:
    """Return the inputs of the disjoint union of graphs of these sizes.

    Raises ValueError for an input that only some of them have and that has no default, and for
    inputs that belong to no thing.
    """
    joined: dict[str, Tensor] = {}
    for slot in forward.interface.inputs:
        parts = [filled(slot, graph, own) for graph, own in zip(graphs, sizes, strict=True)]
        given = [part for part in parts if part is not None]
        if not given:
            continue
        if len(given) < len(parts) or not slot.symbols:
            raise ValueError(f"input '{slot.name}' cannot be joined")
        if slot.index:
            given = [
                _shifted(part, [sum(own[symbol] for own in sizes[:position])
                                for symbol in slot.row_bounds])
                for position, part in enumerate(given)
            ]  # fmt: skip
        joined[slot.name] = torch.cat(given, dim=slot.symbol_axis)
    return joined


def joined_sizes(sizes: Sequence[Sizes]) -> Sizes:
    """Return each symbol's count in the disjoint union of graphs of these sizes."""
    return {symbol: sum(own[symbol] for own in sizes) for symbol in sizes[0]}


def split(interface: Interface, outputs: Outputs, sizes: Sequence[Sizes]) -> tuple[Outputs, ...]:
    """Return each graph's outputs; raises ValueError for outputs that belong to no thing."""
    by_slot = []
    for slot, tensor in zip(interface.outputs, outputs, strict=True):
        if not slot.symbols:
            raise ValueError(f"output '{slot.name}' cannot be split")
        lengths = [own[slot.symbols[0]] for own in sizes]
        by_slot.append(
            [part.contiguous() for part in torch.split(tensor, lengths, dim=slot.symbol_axis)]
        )
    return tuple(zip(*by_slot, strict=True))


def _shifted(part: Tensor, firsts: Sequence[int]) -> Tensor:
    """Return indices plus the first thing that each row points to, or all rows.

    No tensor of these numbers is copied to a device, which would wait for it.
    """
    if len(set(firsts)) == 1:
        return part + firsts[0]
    shifted = torch.empty_like(part)
    for row, first in enumerate(firsts):
        torch.add(part[row], first, out=shifted[row])
    return shifted


def _parameters(forward: Callable[..., Any]) -> tuple[list[str] | None, bool]:
    """Return the names of a forward's parameters, and True when it takes any name.

    Returns None for the names when it takes any number of arguments by position.
    """
    kinds = inspect.Parameter
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return None, False
    named = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD,
                                                      kinds.KEYWORD_ONLY)]  # fmt: skip
    if any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        return None, False
    return named, any(p.kind is kinds.VAR_KEYWORD for p in parameters)


def _named(base: str, slots: Sequence[InputSlot], names: list[str] | None) -> str | None:
    """Return the parameter that the inputs belong to; None when none has their name."""
    several = "." in slots[0].name
    wanted = (f"{base}_dict", base) if several else (base,)
    return next((name for name in wanted if names is not None and name in names), None)


def _by_type(slots: Sequence[InputSlot]) -> bool:
    """Return True for inputs that are entries of a dict, and not of a tuple."""
    _, dot, rest = slots[0].name.partition(".")
    return bool(dot) and not rest.isdecimal()


def _base(slots: Sequence[InputSlot]) -> str:
    """Return the part of the inputs' names before their first dot."""
    return slots[0].name.partition(".")[0]


def _dict(entries: Mapping[str, Tensor | None]) -> dict[str | tuple[str, ...], Any]:
    """Return a dict by type, of tensors, or of tuples where numbers follow after a dot."""
    tuples: dict[str, dict[str, Tensor | None]] = {}
    found: dict[str | tuple[str, ...], Any] = {}
    for name, value in entries.items():
        key, _, place = name.rpartition(".")
        if key and place.isdecimal():
            tuples.setdefault(key, {})[place] = value
        elif value is not None:
            parts = tuple(name.split(_TYPES))
            found[parts if len(parts) == 3 else name] = value
    return found | {key: _dict_or_tuple(own) for key, own in tuples.items()}


def _dict_or_tuple(entries: Mapping[str, Tensor | None]) -> Any:
    """Return a tuple where the names are 0, 1, …, and otherwise a dict."""
    places = [str(place) for place in range(len(entries))]
    if sorted(entries) == sorted(places):
        return tuple(entries[place] for place in places)
    return _dict(entries)


def _joined(key: object) -> str:
    return _TYPES.join(map(str, key)) if isinstance(key, tuple) else str(key)


def _shape(slot: TensorSlot) -> str:
    return f"[{', '.join(map(str, slot.shape))}]"
