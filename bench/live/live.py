"""Send the same traces to live servers, one system after the other.

    python -m bench.live.live [--quick] [--seeds 2] [--requests 200] [--rhos 0.1,0.3,0.5]
        [--systems NAME,…] [--executor auto|eager|…] [--out FILE]

Systems are policy+discipline or a baseline (``serve.sim.workload.BASELINES``), each a server of its
own with the same lanes and executors (``bench.kit.live_server``). They take turns: for each seed
every system serves the traces of all loads, sent open loop by one client process on the same
machine (``bench.kit.open_loop``). Targets are 2 × the solo time in the server measured before
(``bench.kit.solo``), alike for all. ρ is arrival rate × mean solo time ÷ cores. A run that other
programs disturbed is discarded and repeated, whatever it showed (``bench.kit.undisturbed``).

`simulated` plays our system's requests again in the simulator (``bench.live.simulated``): as they
were live, and without a host.

`late_server` is the share not answered within the target from arrival. `missed` is the client's
view from the intended send time, transport, refusals and errors included. `server_us` is the
processor time of the server's main process for a request, by the kernel's account. `floor` is
what misses the same targets where nothing runs: the native front alone, by the same client.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.kit.echoes import echo_server
from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.measure import percentiles
from bench.kit.open_loop import LoadRun, load_process
from bench.kit.script import Script, Table
from bench.kit.solo import records
from bench.kit.undisturbed import Undisturbed
from bench.live.simulated import simulated
from serve.sim.workload import BASELINES
from serve.workload import Trace

WARM_UP_RHO = 0.4
#: Processes that take the cores' time.
USERS = ("lanes", "server", "client", "others")
STAGES = ("transport", "queue", "prepare", "suspended", "run", "hand-over", "answer")
SCRIPT = Script(
    "live",
    full={
        "workload": "mix", "seeds": 2, "requests": 200, "rhos": (0.1, 0.3, 0.5),
        "systems": (OURS, "slack+rolling", "bqt+barrier", *BASELINES), "executor": "auto",
    },
    quick={"seeds": 1, "requests": 30, "rhos": (0.3,), "systems": (OURS,)},
    tables=[
        Table("Late live; shares of all cores' time", "means", {
            "system": "{system}", "ρ": "{rho:g}", "late, server": "{late_server:.1%}",
            "missed, client": "{missed:.1%}", "p99 ÷ target": "{p99_over_qt:.2f}",
            "server, µs": "{server_us:,.0f}",
            **{who: f"{{cores_{who}:.0%}}" for who in USERS},
        }),
        Table("The front alone, which runs nothing", "floor", {
            "ρ": "{rho:g}", "missed, client": "{missed:.1%}", "p99 ÷ target": "{p99_over_qt:.2f}",
            "server, µs": "{server_us:,.0f}",
        }),
        Table("Late again in the simulator", "simulated", {
            "ρ": "{rho:g}", "live": "{late_server:.1%}", "as live": "{as_live:.1%}",
            "no host": "{no_host:.1%}",
        }),
    ],
)  # fmt: skip


def stages(row: dict[str, Any], latency_ns: int) -> dict[str, int]:
    """Return where one request's time went, as the client counts it, in ns."""
    return {
        "transport": latency_ns - row["latency_ns"],
        "queue": row["queue_ns"],
        "prepare": row["prepare_exposed_ns"],
        "suspended": row["suspended_ns"],
        "run": row["run_ns"],
        "hand-over": handover_ns(row),
        "answer": row["answer_ns"],
    }


def handover_ns(row: dict[str, Any]) -> int:
    """Return what a launch and hearing of its end took: what no other stage of its row has."""
    inside = row["queue_ns"] + row["prepare_exposed_ns"] + row["suspended_ns"] + row["run_ns"]
    taken_ns: int = row["latency_ns"] - inside - row["answer_ns"]
    return taken_ns


def summary(trace: Trace, run: LoadRun, kept: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what became of a trace, by the client and by the server's records.

    `excess_of_late` is each stage's share of the time beyond the estimate, over requests late at
    the client.
    """
    over: list[float] = []
    late_server = 0
    excess_ns: dict[str, int] = dict.fromkeys(STAGES, 0)
    by_stage: dict[str, list[float]] = {stage: [] for stage in STAGES}
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
                excess_ns[stage] += max(0, taken_ns - assumed_ns)
    count, unanswered = len(run.seen), len(run.seen) - len(over)
    total_ns = sum(excess_ns.values()) or 1
    return {
        "rho": trace.header.rho,
        "rate_hz": trace.header.rate_hz,
        "requests": count,
        "missed": (unanswered + sum(ratio > 1 for ratio in over)) / count,
        "late_server": (unanswered + late_server) / count,
        "over_qt": tail(over),
        "stages_ms": {stage: fmean(by_stage[stage] or [0.0]) for stage in STAGES},
        "tails_ms": {stage: tail(by_stage[stage]) for stage in ("hand-over", "answer")},
        "excess_of_late": {stage: excess_ns[stage] / total_ns for stage in STAGES},
    }


def tail(values: Sequence[float]) -> dict[str, float]:
    """Return the median, 90th and 99th percentile."""
    return percentiles(values or [0.0], (50, 90, 99), 6)


class LiveBench:
    """Traces and targets; serves the traces by one system after the other."""

    def __init__(self, client: Undisturbed, folder: Path, options: argparse.Namespace) -> None:
        self._client, self._folder, self._options = client, folder, options
        self.traces = Traces(folder, options.workload, options.requests)
        with live_server(folder / "first", OURS, options.executor) as server:
            self.traces.measure(server, range(options.seeds))

    def floor(self, seed: int) -> Iterator[dict[str, Any]]:
        """Yield a row for each load, served by the front alone."""
        with echo_server("native") as echo:
            self._client.warm_up(self.traces.make(WARM_UP_RHO, seed)[1], echo.address)
            for rho in self._options.rhos:
                _, path = self.traces.make(rho, seed)
                run, used = self._client.run(path, echo.address, echo.pid)
                over = [seen.over_target or 0.0 for seen in run.seen if not seen.error]
                missed = len(run.seen) - sum(ratio <= 1 for ratio in over)
                yield {
                    "rho": rho,
                    "missed": missed / len(run.seen),
                    "p99_over_qt": tail(over)["p99"],
                    "server_us": self._server_us(run, used),
                }

    def _server_us(self, run: LoadRun, used: dict[str, float]) -> float:
        """Return the processor time of the server's main process for a request."""
        return 1e6 * used["cores_server"] * run.elapsed_s * self.traces.cores / len(run.seen)

    def serve(self, system: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield a row for each load."""
        runs = []
        folder = self._folder / f"{system}-{seed}"
        with live_server(folder, system, self._options.executor) as server:
            self._client.warm_up(self.traces.make(WARM_UP_RHO, seed)[1], server.target)
            for rho in self._options.rhos:
                trace, path = self.traces.make(rho, seed)
                runs.append((trace, *self._client.run(path, server.target, server.pid)))
        kept = records(server.database)
        for trace, run, used in runs:
            row = {"system": system, "seed": seed, **summary(trace, run, kept), **used}
            row["server_us"] = self._server_us(run, used)
            if system == OURS:
                row |= self._simulated(trace, run, kept)
            yield row

    def _simulated(
        self, trace: Trace, run: LoadRun, kept: dict[str, dict[str, Any]]
    ) -> dict[str, float]:
        served = [
            (item, self.traces.solo_of(item), kept[seen.request_uid])
            for item, seen in zip(trace.items, run.seen, strict=True)
            if not seen.error
        ]
        return simulated(served, handover_ns, self.traces.cores)


def over_seeds(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield means over the seeds for each system and load; `late_server` with its range."""
    for system, rho in dict.fromkeys((row["system"], row["rho"]) for row in rows):
        group = [row for row in rows if (row["system"], row["rho"]) == (system, rho)]
        late = [row["late_server"] for row in group]
        found = {"system": system, "rho": rho, "seeds": len(group)}
        for name in ("missed", "late_server", "server_us", "slower", "disturbed"):
            found[name] = fmean(row[name] for row in group)
        found |= {f"cores_{who}": fmean(row[f"cores_{who}"] for row in group) for who in USERS}
        found |= {"late_server_range": [min(late), max(late)]}
        found["p99_over_qt"] = fmean(row["over_qt"]["p99"] for row in group)
        nested = ("stages_ms", "tails_ms", "excess_of_late")
        yield found | {name: mean_of([row[name] for row in group]) for name in nested}


def by_rho(rows: Sequence[dict[str, Any]], rhos: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield the mean of the rows of each load."""
    for rho in rhos:
        if group := [row for row in rows if row["rho"] == rho]:
            yield mean_of(group)


def mean_of(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of dictionaries number by number."""
    if isinstance(values[0], dict):
        return {key: mean_of([value[key] for value in values]) for key in values[0]}
    return fmean(values)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return means over the seeds for each system and load."""
    rows: list[dict[str, Any]] = []
    floor: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, load_process() as process:
        bench = LiveBench(Undisturbed(process), Path(folder), options)
        for seed in range(options.seeds):
            for system in options.systems:
                rows += bench.serve(system, seed)
            floor += bench.floor(seed)
    again = [
        {name: row[name] for name in ("rho", "late_server", "as_live", "no_host")}
        for row in rows
        if row["system"] == OURS
    ]
    return {
        "workload": options.workload,
        "executor": options.executor,
        "requests": options.requests,
        "graphs": bench.traces.pool.sources,
        "solo_ms": bench.traces.solo_ms,
        "means": list(over_seeds(rows)),
        "floor": list(by_rho(floor, options.rhos)),
        "simulated": list(by_rho(again, options.rhos)),
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
