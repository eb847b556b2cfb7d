"""How exact are estimates of models that declare their inputs, on requests of random sizes?

    python -m bench.models.gallery_accuracy [--quick] [--names rgcn,hgt] [--executors eager,csr]

Each model of the gallery is measured as at load, then estimated and run on 200 requests whose
counts vary each by itself (`bench.kit.random_requests`), in a process with a lane's allocator and
meter. Memory: estimate ÷ measured − 1 of the peak of inputs and tensors, and what a run needed,
with what kernels took besides and the answer, ÷ what would be reserved for it. The estimate is the
one that a run has, its things of each kind and its pairs in one graph counted. Time: |estimate ÷
measured − 1|. All requests run once in each of four rounds, in random order, as a server's requests
follow one another: the second of two equal runs finds its tensors in the caches and takes about a
tenth less. `calibrated` compares the calibration alone with the median of a request's four runs;
`corrected` compares each run with the estimate that a server would have at that moment, corrected
by the runs before it, a quarter of them left out; `machine itself` is how far two of the rounds are
from the other two.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bench.kit import gallery
from bench.kit.as_lane import become_lane
from bench.kit.random_requests import random_requests
from bench.kit.script import Script, Table
from serve.estimate import ModelEstimator, Overhead
from serve.estimate.graph_sizes import graph_sizes
from serve.lane.executors import CannotRun, with_executor
from serve.lane.measure.allocator import Allocator
from serve.lane.measure.calibrate import calibrate
from serve.lane.measure.probe_signature import probe_signature
from serve.native import Meter

Counts = tuple[int, ...]
Times = np.ndarray[Any, np.dtype[np.float64]]
Order = np.ndarray[Any, np.dtype[np.int64]]

#: Requests that are estimated to need more are drawn again.
LIMIT_BYTES = 256 << 20
#: Below this, constants and rounding rule; the worst error is given above it only.
LARGE_BYTES = 1_000_000
ROUNDS = 4
SCRIPT = Script(
    "gallery_accuracy",
    full={"names": tuple(gallery.GALLERY), "executors": ("eager", "csr"), "requests": 200,
          "budget": 3.0},
    quick={"names": ("rgcn", "links"), "executors": ("csr",), "requests": 6, "budget": 0.2},
    tables=[
        Table("Models that declare their inputs: estimate ÷ measured − 1", "models", {
            "model": "{model}", "executor": "{executor}", "requests": "{requests}",
            "memory, median": "{memory_median:.2%}", "worst over 1 MB": "{memory_worst:.2%}",
            "lowest": "{memory_low:.2%}", "need ÷ reserve": "{need_share_of_reserve_max:.3f}",
            "time, calibrated": "{time_median:.1%}, {time_p95:.0%}",
            "corrected": "{corrected_median:.1%}, {corrected_p95:.0%}",
            "machine itself": "{repeat_median:.1%}",
        })
    ],
)  # fmt: skip


def row(name: str, executor: str, options: argparse.Namespace, meter: Meter) -> dict[str, Any]:
    """Return the errors of one model on one executor; raises CannotRun."""
    loaded = with_executor(gallery.load(name), executor)
    signature = probe_signature(loaded)
    calibration = calibrate(
        loaded,
        signature,
        budget_s=options.budget,
        max_bytes=LIMIT_BYTES,
        allocator=Allocator(meter.held_by),
    )
    estimator = ModelEstimator(calibration, Overhead())
    memory, large, needs, sizes = [], [], [], []
    interface = gallery.interface(loaded)
    found = random_requests(
        interface,
        options.requests,
        seed=11,
        fits=lambda counts: estimator.memory(*counts)[1] <= LIMIT_BYTES,
    )
    requests = [(counts, inputs, partial(loaded.outputs, inputs)) for counts, inputs in found]
    for counts, inputs, run in requests:
        staged = sum(tensor.nbytes for tensor in inputs.values())
        live = meter.live_bytes()
        held = staged + meter.held_by(run)
        measured = staged + meter.peak_bytes() - live
        by_kind = interface.kind_counts(inputs) if estimator.counts_kinds else None
        if estimator.counts_graphs:
            counts += estimator.graphs.told(graph_sizes(loaded.spec.batches, inputs, counts))
        sizes.append(counts)
        peak, reserve = estimator.memory(*counts, by_kind=by_kind)
        memory.append(peak / measured - 1)
        if measured >= LARGE_BYTES:
            large.append(memory[-1])
        needs.append((held + estimator.output_bytes(*counts)) / reserve)
    took, orders = _in_rounds([run for *_, run in requests])
    fitted = np.array([estimator.fitted_ns(*counts) for counts in sizes])
    times = np.abs(fitted / np.median(took, axis=0) - 1)
    corrected = _corrected(estimator, sizes, took, orders)
    repeats = np.abs(np.median(took[::2], axis=0) / np.median(took[1::2], axis=0) - 1)
    return {
        "model": name,
        "executor": executor,
        "requests": len(memory),
        "memory_median": _rounded(np.median(memory)),
        "memory_worst": _rounded(max(large, default=max(memory))),
        "memory_low": _rounded(min(memory)),
        "below_measured": sum(error < 0 for error in memory),
        "above_reserve": sum(need > 1 for need in needs),
        "need_share_of_reserve_max": _rounded(max(needs)),
        "time_median": _rounded(np.median(times)),
        "time_p95": _rounded(np.quantile(times, 0.95)),
        "corrected_median": _rounded(np.median(corrected)),
        "corrected_p95": _rounded(np.quantile(corrected, 0.95)),
        "repeat_median": _rounded(np.median(repeats)),
        "warning": calibration.warning,
    }


def _in_rounds(runs: Sequence[Callable[[], Any]]) -> tuple[Times, list[Order]]:
    """Return the processor time of each run in each round, in ns, and each round's order.

    Times are [ROUNDS, runs].
    """
    took = np.empty((ROUNDS, len(runs)))
    rng = np.random.default_rng(5)
    orders = [rng.permutation(len(runs)) for _ in took]
    for row, order in zip(took, orders, strict=True):
        for at in order:
            started_ns = time.thread_time_ns()
            runs[at]()
            row[at] = time.thread_time_ns() - started_ns
    return took, orders


def _corrected(
    estimator: ModelEstimator, sizes: Sequence[Counts], took: Times, orders: Sequence[Order]
) -> Times:
    """Return |estimate ÷ measured − 1| of the runs but the first quarter, in their order.

    The estimate learns from each run after it is compared.
    """
    errors = []
    for row, order in zip(took, orders, strict=True):
        for at in order:
            errors.append(abs(estimator.run_ns(*sizes[at]) / row[at] - 1))
            estimator.observe_run(sizes[at], int(row[at]))
    return np.array(errors[len(errors) // 4 :])


def _rounded(value: Any) -> float:
    return round(float(value), 5)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each model and executor that runs it."""
    meter = become_lane("bench.models.gallery_accuracy")
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    for name in options.names:
        for executor in options.executors:
            try:
                rows.append(row(name, executor, options, meter))
            except CannotRun as error:
                refused[f"{executor} {name}"] = str(error)
    return {"models": rows, "cannot_run": refused}


if __name__ == "__main__":
    become_lane("bench.models.gallery_accuracy")
    SCRIPT.main(measure, __doc__)
