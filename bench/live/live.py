"""The same traces through live servers, one system after the other, and through the simulator.

    python -m bench.live.live [--quick] [--seeds 2] [--requests 200] [--rhos 0.1,0.3,0.5]
        [--systems NAME,…] [--executor auto|eager|…] [--out FILE]

Systems are policy+discipline or a baseline (``serve.sim.workload.BASELINES``), each a server of its
own with the same lanes and executors (``bench.kit.live_server``). They take turns: for each seed
every system serves the traces of all loads, sent open loop by one client process on the same
machine. Targets are absolute: 2 × the solo time in the server measured before (``bench.kit.solo``),
alike for all.

ρ is nominal: arrival rate × mean solo time ÷ cores, as everywhere. The main process and the client
work on the cores of the lanes, so the result also says which share of all cores' time each took
(`cores_*`) and how much `slower` these were than at their best. A run that others disturbed is
thrown away, whatever it showed, and made again (``bench.kit.undisturbed``).

`late_server` is what the server promises: answered within the target from arrival on. `missed` is
what the client sees from the intended send time, transport included, with refusals and errors. For
the late ones of the client the time beyond what the estimate assumed is summed by stage. The first
`LATE_LISTED` that our system answered late are in the result, under `late`.

`simulated` serves the same trace on a virtual clock, on a device as one more run at the same load,
of our system and of a trace of its own, shows it: how far runs are off, how much slower beside
others, hand-over. Server and client take from the cores what they took for each request there; for
our system also half of it, and nothing (`simulated_host`), to tell what is the host's doing.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.open_loop import LoadRun, load_process
from bench.kit.result import write_result
from bench.kit.solo import records
from bench.kit.undisturbed import Undisturbed
from bench.live.live_late import STAGES, late_ones, stages
from bench.live.live_sim import Learned, Twin, waits_ns
from bench.scheduling.policies import missed_share
from serve.journal import decode
from serve.sim.report import summarize
from serve.sim.workload import BASELINES
from serve.workload import Trace

SYSTEMS = (OURS, "slack+rolling", "bqt+barrier", *BASELINES)
QUICK_SYSTEMS = (OURS, "bqt+barrier", "default")
WARM_UP_RHO = 0.4
#: Of each run.
LATE_LISTED = 30
#: Shares of the host's processor time for which ours is simulated besides.
HOSTS = (0.5, 0.0)
WHO = ("lanes", "server", "client", "others")


def learn(
    client: Undisturbed,
    traces: Traces,
    folder: Path,
    executor: str,
    seeds: int,
    rhos: Sequence[float],
) -> dict[float, Twin]:
    """Measure all requests alone; then what the device is like at each load, by another trace."""
    path, own_seed, learned = folder / "journal.jsonl", seeds, {}
    cores = len(os.sched_getaffinity(0))
    with live_server(folder / "first", OURS, executor, journal=str(path)) as server:
        traces.measure(server, range(seeds + 1))
        client.warm_up(traces.make(WARM_UP_RHO, own_seed)[1], server.target)
        for rho in rhos:
            trace, saved = traces.make(rho, own_seed)
            from_ns = time.monotonic_ns()
            run, used = client.run(saved, server.target, server.pid)
            server_s = used["cores_server"] * run.elapsed_s * cores
            learned[rho] = Learned(trace, run, server_s, from_ns, time.monotonic_ns())
    with path.open("rb") as lines:
        journal = decode(lines, str(path))
    kept = records(server.database)
    return {rho: Twin(traces, journal, one, kept, cores) for rho, one in learned.items()}


def serve_traces(
    client: Undisturbed,
    traces: Traces,
    folder: Path,
    system: str,
    executor: str,
    seed: int,
    rhos: Sequence[float],
) -> Iterator[dict[str, Any]]:
    """A row per load."""
    runs = []
    with live_server(folder, system, executor) as server:
        client.warm_up(traces.make(WARM_UP_RHO, seed)[1], server.target)
        for rho in rhos:
            trace, path = traces.make(rho, seed)
            runs.append((trace, *client.run(path, server.target, server.pid)))
    kept = records(server.database)
    for trace, run, used in runs:
        row = {"system": system, "seed": seed, **summary(trace, run, kept), **used}
        if system == OURS:
            row["late"] = list(islice(late_ones(trace, run, kept, traces), LATE_LISTED))
        yield row


def summary(trace: Trace, run: LoadRun, kept: dict[str, dict[str, Any]]) -> dict[str, Any]:
    over: list[float] = []
    late_server = 0
    excess_ms: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    by_stage: dict[str, list[float]] = defaultdict(list)
    for item, seen in zip(trace.items, run.seen, strict=True):
        if seen.error:
            continue
        assert item.qos_target_us is not None
        row = kept[seen.request_uid]
        late_server += row["latency_ns"] > item.qos_target_us * 1000
        over.append(seen.latency_ns / 1000 / item.qos_target_us)
        for stage, taken_ns in stages(row, seen.latency_ns).items():
            by_stage[stage].append(taken_ns / 1e6)
            if over[-1] > 1:
                assumed_ns = row["run_estimate_ns"] if stage == "run" else 0
                excess_ms[stage] += max(0, taken_ns - assumed_ns) / 1e6
    late = sum(ratio > 1 for ratio in over)
    unanswered = len(run.seen) - len(over)
    return {
        "rho": trace.header.rho,
        "rate_hz": trace.header.rate_hz,
        "requests": len(run.seen),
        "answered": len(over),
        "missed": (unanswered + late) / len(run.seen),
        "late_server": (unanswered + late_server) / len(run.seen),
        "over_qt": tail(over),
        "stages_ms": {stage: statistics.fmean(by_stage[stage] or [0.0]) for stage in STAGES},
        "tails_ms": {stage: tail(by_stage[stage]) for stage in ("hand-over", "answer")},
        "excess_of_late": {s: excess_ms[s] / (sum(excess_ms.values()) or 1.0) for s in STAGES},
        "send_lag_p99_ms": quantile([seen.lag_ns / 1e6 for seen in run.seen], 99),
        "elapsed_s": run.elapsed_s,
        "errors": sorted({seen.error for seen in run.seen if seen.error}),
    }


def tail(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": quantile(values, q) for q in (50, 90, 99)}


def quantile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


def over_seeds(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Means for each system and load, with the range of what varies most."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["system"], row["rho"]].append(row)
    for (system, rho), group in groups.items():
        found: dict[str, Any] = {"system": system, "rho": rho}
        for name in ("missed", "late_server", *(f"cores_{who}" for who in WHO)):
            found[name] = statistics.fmean(row[name] for row in group)
        found["simulated"] = statistics.fmean(row["simulated"] for row in group)
        if system == OURS:
            found["simulated_host"] = {
                share: statistics.fmean(row["simulated_host"][share] for row in group)
                for share in HOSTS
            }
            for name in ("tails_ms", "simulated_tails_ms"):
                found[name] = {
                    stage: {q: statistics.fmean(row[name][stage][q] for row in group) for q in of}
                    for stage, of in group[0][name].items()
                }
        late = [row["late_server"] for row in group]
        found["late_server_range"] = [min(late), max(late)]
        found["p99_over_qt"] = statistics.fmean(row["over_qt"]["p99"] for row in group)
        found["slower"] = statistics.fmean(row["slower"] for row in group)
        found["disturbed"] = sum(row["disturbed"] for row in group)
        for name in ("stages_ms", "excess_of_late"):
            found[name] = {s: statistics.fmean(row[name][s] for row in group) for s in STAGES}
        yield found


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("system", "ρ", "late, server", "range", "simulated", "missed, client", "p99 ÷ QT",
                  *WHO, title="Late live and simulated; shares of all cores' time")  # fmt: skip
    where = Table("system", "ρ", *STAGES, title="Stages, mean ms (share of the late ones' excess)")
    for row in rows:
        low, high = row["late_server_range"]
        name = row["system"], f"{row['rho']:g}"
        table.add_row(
            *name, f"{row['late_server']:.1%}", f"{low:.1%}–{high:.1%}", f"{row['simulated']:.1%}",
            f"{row['missed']:.1%}", f"{row['p99_over_qt']:.2f}",
            *(f"{row[f'cores_{who}']:.0%}" for who in WHO),
        )  # fmt: skip
        means, excess = row["stages_ms"], row["excess_of_late"]
        where.add_row(*name, *(f"{means[s]:.2f} ({excess[s]:.0%})" for s in STAGES))
    console = Console(width=130)
    console.print(table)
    console.print(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three systems, one seed")
    parser.add_argument("--workload", default="mix")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rhos", default="0.1,0.3,0.5")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--executor", default="auto", help="of the configuration: models.executor")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    executor = options.executor
    if options.out is None:
        suffix = "" if executor == "auto" else f"_{executor}"
        options.out = Path(f"bench/results/live{suffix}.json")
    if options.quick:
        options.seeds, options.systems = 1, ",".join(QUICK_SYSTEMS)
    rhos = [float(rho) for rho in options.rhos.split(",")]
    systems = options.systems.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, load_process() as process:
        client, folder = Undisturbed(process), Path(name)
        cores = len(os.sched_getaffinity(0))
        traces = Traces(folder, options.workload, options.requests, cores)
        twins = learn(client, traces, folder, executor, options.seeds, rhos)
        for seed in range(options.seeds):
            for number, system in enumerate(systems):
                there = folder / f"{number}-{seed}"
                for row in serve_traces(client, traces, there, system, executor, seed, rhos):
                    twin, here = twins[row["rho"]], (system, row["rho"], seed)
                    answered = twin.answered(*here)
                    row["simulated"] = missed_share(summarize(answered))
                    if system == OURS:
                        hosts = {share: twin.with_host(share).late(*here) for share in HOSTS}
                        row["simulated_host"] = hosts
                        row["simulated_tails_ms"] = {
                            stage: tail([ns / 1e6 for ns in all_ns])
                            for stage, all_ns in waits_ns(answered).items()
                        }
                    rows.append(row)
    means = list(over_seeds(rows))
    show(means)
    content = {
        "workload": options.workload,
        "executor": executor,
        "requests": options.requests,
        "graphs": traces.pool.sources,
        "solo_ms": traces.solo_ms,
        "simulated_device": {rho: twin.facts for rho, twin in twins.items()},
        "means": means,
        "rows": rows,
    }
    write_result(options.out, content)


if __name__ == "__main__":
    main()
