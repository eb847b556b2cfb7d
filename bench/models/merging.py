"""Measure what merging requests of one model into one run gains, and what the decision loses.

    python -m bench.models.merging [--quick] [--repeats 30]

One thread pinned to one core, with a lane's allocator, the four models of configs/dev.toml on
`csr`: k requests of one size as one disjoint union (joined, run, taken apart) beside the same k one
after the other, in turns, in processor time; ratios as quartiles.

The scheduler decides by estimates. Its regret is the time of what it would do with k waiting
requests (its own ``gather``, with targets far away) ÷ the time of the best way measured: one by
one, or unions of any measured k.
"""

import argparse
import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import msgspec
import torch

from bench.kit.as_lane import become_lane
from bench.kit.measure import in_turns, quartiles, ratios
from bench.kit.script import Script, Table
from bench.kit.servers import calibrated_as_asked
from serve.commands.configured import device_of
from serve.commands.estimate import offline_estimators
from serve.config import load_config
from serve.core.lifecycle import State
from serve.core.params import DeviceFacts
from serve.core.policies import get_policy
from serve.core.rules.merging import gather
from serve.core.state.device_state import Board
from serve.core.state.plan import Plan
from serve.core.state.record import Record
from serve.core.types import Bytes, LaneId, Nanos, QoS, Task, TaskEstimate, TaskId
from serve.estimate.estimator import ModelEstimator
from serve.lane.executors import with_executor
from serve.lane.measure.probe_signature import probe_inputs, probe_signature
from serve.lane.models.loader import LoadedModel, load_model
from serve.lane.models.union import run_union
from serve.models.repository import find
from serve.resources import configs_path
from serve.server.lane_run import LAUNCH_NS
from serve.workload import MODELS

EXECUTOR, COUNTS = "csr", (1, 2, 4, 8)
FEATURES = 32
#: Edges by nodes.
EDGES = {30: 120, 100: 500, 300: 2_000, 1_000: 8_000, 3_000: 30_000, 8_000: 80_000}
SCRIPT = Script(
    "merging",
    full={"repeats": 30, "nodes": tuple(EDGES), "models": MODELS},
    quick={"repeats": 3, "nodes": (100,), "models": MODELS[:1]},
    tables=[
        Table("Gain of merging eight requests, and regret of the decision", "results", {
            "model": "{model}", "nodes": "{nodes:,}",
            "gain": "{rows[3][apart_over_merged][1]:.2f}", "groups": "{groups}",
            "regret": "{regret[chosen]:.2f}", "never": "{regret[never]:.2f}",
            "always": "{regret[always]:.2f}",
        })
    ],
)  # fmt: skip


def estimators(names: Sequence[str]) -> dict[str, ModelEstimator]:
    """Return the estimators of these of the demo's models."""
    config = load_config(configs_path() / "dev.toml")
    models = msgspec.structs.replace(config.models, executor=EXECUTOR)
    config = calibrated_as_asked(msgspec.structs.replace(config, models=models))
    return offline_estimators(config, device_of(config), names, lambda _stage, _share: None)


def compared(model: LoadedModel, size: tuple[int, int], count: int, repeats: int) -> dict[str, Any]:
    """Return processor time of `count` requests merged and one by one, and their ratio."""
    names = model.spec.inputs
    probe = probe_inputs(*size, 1, FEATURES, None)
    graphs = [{name: probe[name].clone() for name in names if name in probe}] * count
    signature = probe_signature(model).rows

    def taken_ms(merged: bool) -> float:
        started_ns = time.thread_time_ns()
        if merged:
            run_union(model, graphs, signature)
        else:
            for graph in graphs:
                model.run(graph)
        return (time.thread_time_ns() - started_ns) / 1e6

    ways = {"merged": partial(taken_ms, True), "apart": partial(taken_ms, False)}
    times = in_turns(ways, repeats, limit_s=2.0)
    return {
        "count": count,
        "merged_ms": median(times["merged"]),
        "apart_ms": median(times["apart"]),
        "apart_over_merged": quartiles(ratios(times["apart"], times["merged"])),
    }


def decided(estimator: ModelEstimator, size: tuple[int, int], count: int) -> list[int]:
    """Return the sizes of the groups in which the scheduler would run `count` requests."""
    device = DeviceFacts(Bytes(1 << 50), (LaneId(0),), launch_ns=LAUNCH_NS)
    policy = get_policy("slack")
    plan = Plan(holds_groups=False)
    board = Board(device, plan, policy)
    board.idle.add(LaneId(0))
    estimate = estimator.estimate(*size)
    patient = QoS(Nanos(10**15))
    records = []
    for number in range(count):
        task = Task(TaskId(number), "model", *size, Nanos(0), estimate, patient)
        record = Record(task, policy.key(task), Nanos(0), 1, 0, estimate.solo_ns)
        record.state = State.READY
        records.append(record)

    def union(_model: str, sizes: Sequence[tuple[int, ...]]) -> TaskEstimate:
        return estimator.union(sizes)

    groups = []
    waiting = list(records)
    while waiting:
        plan = Plan(holds_groups=False)
        plan.append(list(waiting), pinned=False)
        board.plan = plan
        members, _ = gather(waiting[0], board, union, Nanos(0), most=max(COUNTS), own_group=False)
        groups.append(len(members))
        waiting = [record for record in waiting if record not in members]
    return groups


def regret(rows: Sequence[dict[str, Any]], groups: Sequence[int], count: int) -> dict[str, float]:
    """Return the time ÷ the best way's of the decision, of never and of always merging.

    The time of a launch is included.
    """
    launch_ms = LAUNCH_NS / 1e6
    took: dict[int, float] = {row["count"]: row["merged_ms"] + launch_ms for row in rows}
    known = sorted(took)

    def run_ms(size: int) -> float:
        if size in took:
            return took[size]
        low = max(k for k in known if k < size)
        high = min(k for k in known if k > size)
        return took[low] + (took[high] - took[low]) * (size - low) / (high - low)

    best = [0.0]
    for total in range(1, count + 1):
        best.append(min(best[total - size] + run_ms(size) for size in range(1, total + 1)))
    chosen = sum(run_ms(size) for size in groups)
    never = count * run_ms(1)
    always = run_ms(count)
    return {
        "chosen": chosen / best[count],
        "never": never / best[count],
        "always": always / best[count],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each model and size."""
    torch.set_num_threads(1)
    found = estimators(options.models)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results: list[dict[str, Any]] = []
    for name, nodes in product(options.models, options.nodes):
        model = load_model(find(configs_path() / "models", name))
        model, size = with_executor(model, EXECUTOR), (nodes, EDGES[nodes])
        rows = [compared(model, size, count, options.repeats) for count in COUNTS]
        groups = decided(found[name], size, max(COUNTS))
        lost = regret(rows, groups, max(COUNTS))
        results.append(
            {"model": name, "nodes": nodes, "edges": EDGES[nodes], "rows": rows, "groups": groups,
             "regret": lost}
        )  # fmt: skip
    return {
        "executor": EXECUTOR,
        "repeats": options.repeats,
        "launch_ns": LAUNCH_NS,
        "results": results,
    }


if __name__ == "__main__":
    become_lane("bench.models.merging")
    SCRIPT.main(measure, __doc__)
