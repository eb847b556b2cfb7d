"""How exact are memory estimates of models that pad the graphs of a batch to the largest?

    python -m bench.models.padded_accuracy [--quick]

Each model is measured as at load, then estimated and run on 200 batches of uneven graphs
(`bench.kit.uneven_batches`), and on 200 merged runs of 2 to 5 such requests, in a process with a
lane's allocator and meter. Estimate ÷ measured − 1 of the peak of inputs and tensors, and what a
run needed, with what kernels took besides and the answer, ÷ what would be reserved for it. `counts
alone` is the estimate without the sizes of graphs, as if all nodes were in one.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.kit.as_lane import become_lane
from bench.kit.padded_models import MODELS, load, request
from bench.kit.script import Script, Table
from bench.kit.uneven_batches import uneven_graphs
from serve.estimate import ModelEstimator, Overhead
from serve.estimate.graph_sizes import graph_sizes
from serve.lane.measure.allocator import Allocator, limited_by
from serve.lane.measure.calibrate import calibrate
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.models.loader import LoadedModel
from serve.native import Meter

LIMIT_BYTES = 256 << 20
#: Below this, constants and rounding rule; errors are given above it only.
LARGE_BYTES = 1_000_000
SCRIPT = Script(
    "padded_accuracy",
    full={"names": tuple(MODELS), "requests": 200, "budget": 2.0},
    quick={"names": ("dense",), "requests": 6, "budget": 0.2},
    tables=[
        Table("Models that pad: estimate ÷ measured − 1", "models", {
            "model": "{model}", "requests": "{requests}", "runs": "{runs}",
            "memory, median": "{memory_median:.2%}", "highest": "{memory_high:.2%}",
            "lowest": "{memory_low:.2%}", "above reserve": "{above_reserve}",
            "need ÷ reserve": "{need_share_of_reserve_max:.3f}",
            "counts alone, lowest": "{counts_alone_low:.0%}",
        })
    ],
)  # fmt: skip

#: Graphs of each request that runs by itself or as one with others.
Requests = list[list[int]]


def _runs(merged: bool, count: int) -> Iterator[Requests]:
    rng = np.random.default_rng(7)
    for _ in range(count):
        if not merged:
            yield list(uneven_graphs(rng, 1))
        else:
            yield [sizes[:100] for sizes in uneven_graphs(rng, int(rng.integers(2, 6)))]


def row(
    name: str, loaded: LoadedModel, estimator: ModelEstimator, meter: Meter,
    options: argparse.Namespace, merged: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the errors of one model for requests that run alone, or merged."""
    rng = np.random.default_rng(9)
    errors, alone, needs, above = [], [], [], 0
    for requests in _runs(merged, options.requests):
        parts = []
        for sizes in requests:
            counts, inputs = request(loaded, sizes, rng)
            told = estimator.graphs.told(graph_sizes(loaded.spec.batches, inputs, counts))
            parts.append((*counts, *told))
        if merged:
            counts, inputs = request(loaded, [one for sizes in requests for one in sizes], rng)
            found = estimator.union(parts)
            # What was staged for each lies beside the joined inputs.
            peak = found.peak_bytes - (estimator.input_bytes(*counts) + 512 * len(parts))
            reserve = found.reserve_bytes
        else:
            peak, reserve = estimator.memory(*parts[0])
        staged = sum(tensor.nbytes for tensor in inputs.values())
        live = meter.live_bytes()
        held = staged + meter.held_by(partial(loaded.outputs, inputs))
        measured = staged + meter.peak_bytes() - live
        need = held + estimator.output_bytes(*counts)
        needs.append(need / reserve)
        above += need > reserve
        if measured >= LARGE_BYTES:
            errors.append(peak / measured - 1)
            alone.append(estimator.memory(*counts)[0] / measured - 1)
    return {
        "model": name,
        "requests": "merged" if merged else "alone",
        "runs": options.requests,
        "memory_median": _rounded(np.median(errors)),
        "memory_high": _rounded(max(errors)),
        "memory_low": _rounded(min(errors)),
        "above_reserve": above,
        "need_share_of_reserve_max": _rounded(max(needs)),
        "counts_alone_low": _rounded(min(alone)),
        "warning": estimator.calibration.warning,
    }


def _rounded(value: Any) -> float:
    return round(float(value), 5)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return two rows for each model: of requests that run alone, and of merged ones."""
    meter = become_lane("bench.models.padded_accuracy")
    rows = []
    for name in options.names:
        loaded = load(name)
        calibration = calibrate(
            loaded,
            probe_signature(loaded),
            budget_s=options.budget,
            max_bytes=LIMIT_BYTES,
            allocator=Allocator(meter.held_by, limited=limited_by(meter, LIMIT_BYTES)),
        )
        estimator = ModelEstimator(calibration, Overhead())
        rows += [row(name, loaded, estimator, meter, options, merged) for merged in (False, True)]
    return {"models": rows}


if __name__ == "__main__":
    become_lane("bench.models.padded_accuracy")
    SCRIPT.main(measure, __doc__)
