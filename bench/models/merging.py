"""What merging requests of one model into one run gives, and what the decision to merge loses.

    python -m bench.models.merging [--quick] [--executor csr] [--repeats 30] [--out FILE]

One thread pinned to one core, with a lane's allocator, the four models of configs/dev.toml on the
executor, requests of one size: k requests as one disjoint union (joined, run, taken apart) beside
the same k one after the other, alternating, in processor time. Given are the medians, their ratio
with its quartiles, requests per second, and the latency of each: with a union all k are answered at
its end, one after the other on average after (k + 1) / 2 runs.

The decision sees estimates only. Its regret: the time of what the scheduler would do with k waiting
requests (its own ``gather``, targets out of the way) ÷ the time of the best way measured, which is
one by one or unions of any measured k.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from bench.kit.as_lane import become_lane
from bench.kit.result import write_result
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
from serve.core.types import Bytes, Estimate, LaneId, Nanos, QoS, Task, TaskId
from serve.estimate.estimator import ModelEstimator
from serve.lane.executors import EXECUTORS, with_executor
from serve.lane.measure.probe_signature import probe_inputs, probe_signature
from serve.lane.models.loader import LoadedModel, load_model
from serve.lane.models.union import run_union
from serve.models.repository import find
from serve.resources import configs_path
from serve.server.lane_run import LAUNCH_NS
from serve.workload import MODELS

SIZES = ((30, 120), (100, 500), (300, 2_000), (1_000, 8_000), (3_000, 30_000), (8_000, 80_000))
QUICK_SIZES = SIZES[1::2]
COUNTS = (1, 2, 4, 8)
FEATURES = 32


def estimators(executor: str) -> dict[str, ModelEstimator]:
    config = load_config(configs_path() / "dev.toml")
    models = msgspec.structs.replace(config.models, executor=executor)
    config = msgspec.structs.replace(config, models=models)
    return offline_estimators(config, device_of(config), MODELS, lambda _stage, _share: None)


def timed(run: Callable[[], object]) -> int:
    started = time.thread_time_ns()
    run()
    return time.thread_time_ns() - started


def measure(model: LoadedModel, size: tuple[int, int], count: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of `count` requests merged and one by one, and their ratio."""
    names = model.spec.inputs
    probe = probe_inputs(*size, 1, FEATURES, None)
    graphs = [{name: probe[name].clone() for name in names if name in probe}] * count
    rows = probe_signature(model).rows

    def merged() -> None:
        run_union(model, graphs, rows)

    def apart() -> None:
        for graph in graphs:
            model.run(graph)

    merged()
    apart()
    pairs = []
    give_up = time.monotonic() + 2.0
    for number in range(repeats):
        first, second = (merged, apart) if number % 2 else (apart, merged)
        one, other = timed(first), timed(second)
        pairs.append((one, other) if number % 2 else (other, one))
        if time.monotonic() > give_up and len(pairs) >= 3:
            break
    ratios = statistics.quantiles([a / m for m, a in pairs], n=4)
    merged_ns = statistics.median(m for m, _ in pairs)
    apart_ns = statistics.median(a for _, a in pairs)
    return {
        "count": count,
        "repeats": len(pairs),
        "merged_ms": merged_ns / 1e6,
        "apart_ms": apart_ns / 1e6,
        "apart_over_merged": ratios,
        "merged_per_s": count / merged_ns * 1e9,
        "apart_per_s": count / apart_ns * 1e9,
        "merged_latency_ms": merged_ns / 1e6,
        "apart_latency_ms": apart_ns / 1e6 * (count + 1) / 2 / count,
    }


def decided(estimator: ModelEstimator, size: tuple[int, int], count: int) -> list[int]:
    """Group sizes in which the scheduler would run `count` waiting requests of that size."""
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
        record = Record(task, policy.key(task), Nanos(0), 1, 0)
        record.state = State.READY
        records.append(record)

    def union(_model: str, sizes: Sequence[tuple[int, int]]) -> Estimate:
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
    """The decision's and the best way's time for `count` requests, a run's launch included."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="three sizes, 8 repeats; no file")
    parser.add_argument("--executor", choices=tuple(EXECUTORS), default="csr")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("bench/results/merging.json"))
    options = parser.parse_args()
    become_lane("bench.models.merging")
    repeats = min(8, options.repeats) if options.quick else options.repeats
    found = estimators(options.executor)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results: list[dict[str, Any]] = []
    for name in MODELS:
        model = with_executor(load_model(find(configs_path() / "models", name)), options.executor)
        for size in QUICK_SIZES if options.quick else SIZES:
            rows = [measure(model, size, count, repeats) for count in COUNTS]
            groups = decided(found[name], size, max(COUNTS))
            results.append(
                {
                    "model": name,
                    "nodes": size[0],
                    "edges": size[1],
                    "rows": rows,
                    "groups": groups,
                    "regret": regret(rows, groups, max(COUNTS)),
                }
            )
    table = Table(title="One by one ÷ merged, of k requests (more than 1: merging is faster)")
    heads = [f"k {count}" for count in COUNTS[1:]]
    for head in ("model", "nodes", *heads, "decided", "regret", "never", "always"):
        table.add_column(head, justify="left" if head == "model" else "right")
    for one in results:
        gains = [f"{row['apart_over_merged'][1]:.2f}" for row in one["rows"][1:]]
        lost = [f"{one['regret'][key]:.2f}" for key in ("chosen", "never", "always")]
        decided_as = "+".join(map(str, one["groups"][:4]))
        table.add_row(one["model"], f"{one['nodes']:,}", *gains, decided_as, *lost)
    Console(width=120).print(table)
    for key in ("chosen", "never", "always"):
        mean = statistics.geometric_mean(one["regret"][key] for one in results)
        worst = max(one["regret"][key] for one in results)
        print(f"regret of merging as {key}: geometric mean {mean:.3f}, worst {worst:.2f}")
    if not options.quick:
        result = {
            "executor": options.executor,
            "repeats": repeats,
            "launch_ns": LAUNCH_NS,
            "results": results,
        }
        write_result(options.out, result)


if __name__ == "__main__":
    main()
