"""How the sizes of a model's inputs follow from a graph's counts, for runs of fixed sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from serve.inputs import INPUTS
from serve.interface import Interface

#: Each symbol's count in a graph; of the short form "N" nodes and "E" edges.
Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SizedInput:
    """An input that has an entry for each thing that a symbol counts."""

    symbol: str
    #: The axis of these entries.
    axis: int
    #: Of an index, the symbol that each of its rows points to, or the one of all.
    points_to: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizing:
    """All inputs of a model that depend on counts."""

    inputs: Mapping[str, SizedInput]
    #: Symbols that count nodes.
    nodes: tuple[str, ...]

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """All symbols."""
        return tuple(dict.fromkeys(sized.symbol for sized in self.inputs.values()))

    def counts(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the counts that the shapes of a graph's inputs tell; 0 where none does."""
        found = dict.fromkeys(self.symbols, 0)
        for name, sized in self.inputs.items():
            if name in shapes:
                found[sized.symbol] = shapes[name][sized.axis]
        return found


def sizing_of(interface: Interface | None) -> Sizing:
    """Return the sizing of a model with that interface; None is the short form.

    Raises ValueError, with the reason, where shapes do not tell all sizes.
    """
    if interface is None:
        return SHORT
    for slot in (*interface.inputs, *interface.outputs):
        if len(slot.symbols) > 1:
            raise ValueError(f"'{slot.name}' has a size for each of {', '.join(slot.symbols)}")
    if interface.graphs:
        raise ValueError(f"values tell the number of {', '.join(interface.graphs)}")
    return Sizing(
        {
            slot.name: SizedInput(
                slot.symbols[0],
                slot.symbol_axis,
                slot.row_bounds if len(set(slot.index)) > 1 else slot.index,
            )
            for slot in interface.inputs
            if slot.symbols
        },
        interface.nodes,
    )


SHORT = Sizing(
    {
        name: SizedInput(*each.per, ("N",) if each.ids_below == "N" else ())
        for name, each in INPUTS.items()
    },
    ("N",),
)
