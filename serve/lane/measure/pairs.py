"""Fit the memory of a model whose work is on pairs of things in one graph, as atoms of a molecule.

Probes are one graph each, so without this an estimate is that of a request which is one graph.
"""

from collections.abc import Callable, Iterable

import numpy as np

from serve.estimate.calibration import Curve
from serve.estimate.graph_sizes import GraphTerms
from serve.estimate.memory import MemoryTrace, fit_curve
from serve.lane.measure.kinds import Held
from serve.lane.measure.probe import ModelProbe
from serve.lane.measure.probe_graphs import Shape, Structure

#: Shapes between one graph and as many as there are things.
PAIRED = (Shape.PLAIN, Shape.MANY, Shape.SINGLES)
#: What counting pairs must spare on average, as a share of the estimate.
_LEAST_GAIN = 0.05


def curve_with_pairs(
    probe: ModelProbe,
    peaks: Iterable[tuple[int, ...]],
    held: Held,
    trace: Callable[[Shape], Iterable[MemoryTrace]],
) -> tuple[Curve, GraphTerms] | None:
    """Return a curve that counts pairs; None where it is hardly below one that does not.

    `peaks` are (counts …, bytes) of plain graphs; `trace` runs graphs of another shape.
    """
    graphs = GraphTerms(tuple(position for _, position in probe.loaded.spec.batches))
    if not graphs.of:
        return None
    of_shape: list[tuple[Structure, tuple[int, ...]]] = [
        (Shape.PLAIN, tuple(found)) for found in peaks
    ]
    of_shape += [
        (shape, (*found.counts, found.peak_bytes)) for shape in PAIRED[1:] for found in trace(shape)
    ]
    of_shape += [(shape, tuple(found)) for shape, all_held in held.items() for found in all_held]
    samples = [(*probe.counts(found[:-1], shape, graphs), found[-1]) for shape, found in of_shape]
    counted = fit_curve(samples, len(graphs.of))
    simple = fit_curve([found for _, found in of_shape])
    spared = [
        1 - counted.at(*sample[:-1]) / simple.at(*found[:-1])
        for sample, (_, found) in zip(samples, of_shape, strict=True)
    ]
    return (counted, graphs) if np.mean(spared) >= _LEAST_GAIN else None
