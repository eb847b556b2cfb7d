"""What training beside requests costs them, and what it gets of the time they leave.

    python -m bench.live.training [--quick] [--seeds 2] [--requests 200] [--rhos 0.1,0.3,0.5,0.7]
        [--slack governed,strict] [--out FILE]

The same traces are sent to one server without jobs, and with one job for each core, in turns: for
each seed and load first without, then by each rule of slack. Client, traces and targets are those
of ``bench.live.live``. `late_server` is the share not answered within the target from arrival,
`handover_p99_ms` what a launch and hearing of its end took.

`used` is the jobs' steps a second, as a share of what they would be on the time that lanes, server,
client and others leave in the same turn without jobs: steps a second of the jobs alone × that share
of the cores.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.open_loop import load_process
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.solo import records
from bench.kit.undisturbed import Undisturbed
from bench.kit.waiting import wait_for
from bench.live.live import USERS, WARM_UP_RHO, summary
from serve.client import Client

#: More than a turn can have.
_EPOCHS = 1_000_000
#: Time for which the jobs are alone.
_ALONE_S = 5.0
GRAPH: dict[str, object] = {"name": "community", "dataset": "community"}
MODEL = "gcn"

SCRIPT = Script(
    "training",
    full={"workload": "mix", "seeds": 2, "requests": 200, "rhos": (0.1, 0.3, 0.5, 0.7),
          "slack": ("governed", "strict")},
    quick={"seeds": 1, "requests": 30, "rhos": (0.3,), "slack": ("governed",)},
    tables=[
        Table("Training beside requests", "means", {
            "jobs": "{slack}", "ρ": "{rho:g}", "late, server": "{late_server:.1%}",
            "missed, client": "{missed:.1%}", "hand-over p99, ms": "{handover_p99_ms:.2f}",
            "idle without jobs": "{idle:.0%}", "of it used": "{used:.0%}",
        }),
    ],
)  # fmt: skip


class Jobs:
    """The jobs of one server, one for each core."""

    def __init__(self, server: ServerProcess, cores: int) -> None:
        self._client = Client(server.target)
        self._ids = [
            self._client.train(MODEL, "community", epochs=_EPOCHS, seed=seed, fresh=True).job_id
            for seed in range(cores)
        ]
        wait_for(lambda: all(job.epochs_done for job in self.running()), "all jobs to train")

    def running(self) -> list[Any]:
        """Return the jobs as they stand."""
        return [job for job in self._client.jobs() if job.job_id in self._ids]

    def steps(self) -> tuple[float, int]:
        """Return the time, and the steps done by then."""
        return time.monotonic(), sum(job.epochs_done for job in self.running())

    def close(self) -> None:
        """End them."""
        for job_id in self._ids:
            self._client.cancel_job(job_id)
        self._client.close()


def rate(before: tuple[float, int], after: tuple[float, int]) -> float:
    """Return steps a second."""
    return (after[1] - before[1]) / (after[0] - before[0])


class TrainingBench:
    """Serves the same traces without jobs and beside them."""

    def __init__(self, client: Undisturbed, folder: Path, options: argparse.Namespace) -> None:
        self._client, self._folder, self._options = client, folder, options
        self.traces = Traces(folder, options.workload, options.requests)
        with live_server(folder / "first", OURS) as server:
            self.traces.measure(server, range(options.seeds))

    def turn(self, rho: float, seed: int) -> Iterator[dict[str, Any]]:
        """Yield a row without jobs, then one for each rule."""
        idle = 1.0
        for slack in ("none", *self._options.slack):
            row = self._serve(rho, seed, slack, idle)
            if slack == "none":
                idle = row["idle"]
            yield row

    def _serve(self, rho: float, seed: int, slack: str, idle: float) -> dict[str, Any]:
        folder, used = self._folder / f"{slack}-{rho:g}-{seed}", 0.0
        trains = slack != "none"
        training = {"workers": self.traces.cores, "slack": slack} if trains else {}
        with live_server(folder, OURS, sections={"training": training}, graphs=(GRAPH,)) as server:
            self._client.warm_up(self.traces.make(WARM_UP_RHO, seed)[1], server.target)
            trace, path = self.traces.make(rho, seed)
            jobs = Jobs(server, self.traces.cores) if trains else None
            if jobs is not None:
                before = jobs.steps()
                time.sleep(_ALONE_S)
                alone = rate(before, start := jobs.steps())
            run, shares = self._client.run(path, server.target, server.pid)
            if jobs is not None:
                used = rate(start, jobs.steps()) / (alone * idle)
                jobs.close()
        if not trains:
            idle = 1 - sum(shares[f"cores_{who}"] for who in USERS)
        found = summary(trace, run, records(server.database))
        return {
            "slack": slack, "rho": rho, "seed": seed, "late_server": found["late_server"],
            "missed": found["missed"], "handover_p99_ms": found["tails_ms"]["hand-over"]["p99"],
            "idle": idle, "used": used, "disturbed": shares["disturbed"],
        }  # fmt: skip


def means(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield means over the seeds, with the range of late answers."""
    for slack, rho in dict.fromkeys((row["slack"], row["rho"]) for row in rows):
        group = [row for row in rows if (row["slack"], row["rho"]) == (slack, rho)]
        late = [row["late_server"] for row in group]
        numbers = ("late_server", "missed", "handover_p99_ms", "idle", "used", "disturbed")
        found = {name: fmean(row[name] for row in group) for name in numbers}
        yield {"slack": slack, "rho": rho, **found, "late_server_range": [min(late), max(late)]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each rule and load."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, load_process() as process:
        bench = TrainingBench(Undisturbed(process), Path(folder), options)
        for seed in range(options.seeds):
            for rho in options.rhos:
                rows += bench.turn(rho, seed)
    return {
        "workload": options.workload, "requests": options.requests,
        "solo_ms": bench.traces.solo_ms, "means": list(means(rows)), "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
