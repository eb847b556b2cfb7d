"""Measure the time of a model's runs over sizes."""

from collections.abc import Callable

import torch

from serve.estimate.calibration import (
    MemoryFit,
    TimeFit,
)
from serve.estimate.timing import Timed, fit_time
from serve.lane import clock
from serve.lane.measure.allocator import TooLarge
from serve.lane.measure.padded import DIVIDED
from serve.lane.measure.pairs import PAIRED
from serve.lane.measure.probe import ModelProbe, need_for
from serve.lane.measure.probe_graphs import Shape, varied
from serve.lane.measure.trials import SMALLEST_NODES
from serve.progress import Progress

_TIMED_RATIOS = (2, 10, 30)
#: Sizes double. Lower and upper bound of their number.
_LEAST_STEPS, _MAX_STEPS = 5, 20
#: The first size that takes this long is the last.
_LONG_RUN_NS = 90_000_000
_MAX_ROUNDS = 9
#: Counts and shape of a graph.
_Probe = tuple[tuple[int, ...], Shape]
#: Share of the time for finding the largest sizes.
_CLIMB_SHARE = 0.5


def measure_time(
    probe: ModelProbe,
    memory: MemoryFit,
    max_bytes: int,
    stop_at_ns: int,
    tell: Progress,
    expect: Callable[[int], None],
) -> TimeFit:
    """Time runs over log-spaced sizes: once upwards to find the largest, then in rounds.

    Rounds go from large to small, so that the allocator has its memory before small graphs are
    timed, and a disturbance hits one run of many sizes rather than all runs of one.
    """
    divided = memory.graphs
    need = need_for(memory.inputs, memory.activations, memory.curve, divided)
    started_ns = clock.now_ns()
    span_ns = max(stop_at_ns - started_ns, 1_000_000)
    graphs: dict[_Probe, dict[str, torch.Tensor]] = {}
    runs: dict[_Probe, list[int]] = {}

    def time_one(one: _Probe) -> int:
        expect(int(need(*probe.counts(*one, divided))))
        return _time_ns(probe, graphs[one])

    shapes = DIVIDED if divided.padded else PAIRED if divided.of else PAIRED[:1]
    smallest = [(least, shape) for least in _smallest(probe) for shape in shapes]
    for index, (least, shape) in enumerate(smallest, start=1):
        climb_until_ns = started_ns + span_ns * _CLIMB_SHARE * index / len(smallest)
        for step in range(_MAX_STEPS):
            size = tuple(count << step for count in least)
            too_large = (
                need(*probe.counts(size, shape, divided)) > max_bytes
                or clock.now_ns() > climb_until_ns
            )
            if step >= _LEAST_STEPS and too_large:
                break
            one = size, shape
            graphs[one] = probe.site.stage(probe.graph(size, shape))
            try:
                runs[one] = [time_one(one)]
            except TooLarge:
                del graphs[one]
                break
            if step >= _LEAST_STEPS and runs[one][0] > _LONG_RUN_NS:
                break
    order = sorted(graphs, key=lambda one: -runs[one][0])
    patience_ns = span_ns / 60
    for round_number in range(_MAX_ROUNDS):
        for one in order:
            if clock.now_ns() > stop_at_ns:
                break
            if round_number < 2 or runs[one][0] < patience_ns:
                runs[one].append(time_one(one))
        tell("time", 0.2 + 0.8 * min(1.0, (clock.now_ns() - started_ns) / span_ns))
    own = len(memory.inputs.per)
    # The first run of a size is a warm-up, if there was time for another.
    samples = [
        Timed(divided.terms(probe.counts(*one, divided), own), tuple(found[1:] or found))
        for one, found in runs.items()
    ]
    num_graph_terms = len(samples[0].counts) - own
    # Work that is not linear in the counts shows in memory.
    return fit_time(samples, products=memory.curve is not None, num_graph_terms=num_graph_terms)


def _smallest(probe: ModelProbe) -> list[tuple[int, ...]]:
    """Return the smallest graphs, whose counts are doubled: their ratios are what varies."""
    spec = probe.loaded.spec
    graphs = [(SMALLEST_NODES, ratio * SMALLEST_NODES) for ratio in _TIMED_RATIOS]
    found = varied(spec, graphs)
    if len(found[0]) == 1:
        # Of one kind of thing only the number can vary.
        found += [tuple(count * 3 // 2 for count in found[0])]
    return found


def _time_ns(probe: ModelProbe, inputs: dict[str, torch.Tensor]) -> int:
    """Return the time of one run, at least 1 ns."""
    return max(1, probe.site.time_ns(probe.runner(inputs)))
