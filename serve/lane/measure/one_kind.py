"""Find the kinds of things that a model takes most memory for, where all things are of one kind.

Live bytes are linear in the number of things of each kind. So no mix of kinds takes more at any
moment than the graph in which all things are of the kind that takes most at that moment.
"""

from collections.abc import Iterator

import numpy as np

from serve.estimate.memory import MemoryTrace
from serve.interface import MOST_KINDS, InputSlot
from serve.lane.measure.probe import ModelProbe
from serve.lane.measure.probe_graphs import OneKind

#: Kinds that are tried of more than `MOST_KINDS`.
_SOME = 16

#: Runs of graphs in which all things of an input are of one kind.
Alone = list[tuple[OneKind, MemoryTrace]]


def kinds_alone(probe: ModelProbe, counts: tuple[int, ...]) -> Alone:
    """Trace a graph of these counts for each kind of each input, and one with the worst of each.

    A graph that the model refuses is left out.
    """
    interface = probe.loaded.spec.interface
    found: Alone = []
    worst: dict[str, int] = {}
    for slot in () if interface is None else interface.inputs:
        if not slot.is_kind or slot.num_kinds < 2 or slot.columns:
            continue
        of_slot = list(_traces(probe, counts, [{slot.name: value} for value in _values(slot)]))
        found += of_slot
        if of_slot:
            (shape, _) = max(of_slot, key=lambda one: one[1].peak_bytes)
            worst |= dict(shape.values)
    if len(worst) > 1:
        found += _traces(probe, counts, [worst])
    return found


def _traces(
    probe: ModelProbe, counts: tuple[int, ...], all_values: list[dict[str, int]]
) -> Iterator[tuple[OneKind, MemoryTrace]]:
    for values in all_values:
        shape = OneKind(tuple(values.items()))
        try:
            probe.attempt(counts, shape)
            yield shape, probe.trace(counts, shape)
        except Exception:
            continue


def _values(slot: InputSlot) -> list[int]:
    """Return the values that an input's things may have, or some of many."""
    low = 0 if slot.datatype == "BOOL" else int(slot.bounds[0])
    if slot.num_kinds <= MOST_KINDS:
        return list(range(low, low + slot.num_kinds))
    return [low + int(step * (slot.num_kinds - 1)) for step in np.linspace(0, 1, _SOME)]
