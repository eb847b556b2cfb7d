"""What training beside requests costs them, and what it gets of the time they leave.

    python -m bench.live.training [--quick] [--seeds 2] [--turns 2] [--requests 200]
        [--rhos 0.1,0.3,0.5,0.7] [--slack governed,strict] [--out FILE]

For each seed and rule of slack there is one server. It serves the same traces in turns: without
jobs, and with one job for each core. What comes first changes from turn to turn, so that neither
has the warmer server. Client, traces and targets are those of ``bench.live.live``. A run is
repeated for other programs on this machine only: cores that nothing uses are slower by themselves,
which is no disturbance (``bench.kit.undisturbed``).

`late_server` is the share not answered within the target from arrival, `handover_p99_ms` what a
launch and hearing of its end took. `accounting` compares each request with and without jobs, part
by part (``bench.live.accounting``).

`used` is the jobs' steps a second, as a share of what they would be on the time that lanes, server,
client and others leave without jobs: steps a second of the jobs alone × that share of the cores.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.kit.live_setup import OURS, Traces, live_server
from bench.kit.open_loop import LoadRun, load_process
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.solo import records
from bench.kit.undisturbed import Undisturbed
from bench.kit.waiting import wait_for
from bench.live.accounting import Account, accounts, compared, run_over_estimate
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
    full={"workload": "mix", "seeds": 2, "turns": 2, "requests": 200, "rhos": (0.1, 0.3, 0.5, 0.7),
          "slack": ("governed", "strict")},
    quick={"seeds": 1, "turns": 1, "requests": 30, "rhos": (0.3,), "slack": ("governed",)},
    tables=[
        Table("Training beside requests", "means", {
            "jobs": "{slack}", "ρ": "{rho:g}", "late, server": "{late_server:.1%}",
            "missed, client": "{missed:.1%}", "hand-over p99, ms": "{handover_p99_ms:.2f}",
            "run ÷ estimate": "{run_over_estimate:.2f}",
            "idle without jobs": "{idle:.0%}", "of it used": "{used:.0%}",
        }),
        Table("Parts of a request's time without and with jobs, ms", "accounting", {
            "jobs": "{slack}", "ρ": "{rho:g}", "part": "{part}",
            "mean": "{without_ms:.2f}", "with jobs": "{with_ms:.2f}",
            "p99": "{without_p99_ms:.2f}", "p99 with jobs": "{with_p99_ms:.2f}",
            "late only with": "{late_only_with}", "grew most": "{grew_most:.0%}",
            "late only without": "{late_only_without}", "shrank most": "{shrank_most:.0%}",
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

    def alone(self) -> float:
        """Return their steps a second while there is no request."""
        before = self.steps()
        time.sleep(_ALONE_S)
        return rate(before, self.steps())

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
        #: Of each run, by its row.
        self.runs: list[tuple[dict[str, Any], list[Account | None]]] = []
        with live_server(folder / "first", OURS) as server:
            self.traces.measure(server, range(options.seeds))

    def serve(self, slack: str, seed: int) -> None:
        """Add the runs of one server."""
        folder = self._folder / f"{slack}-{seed}"
        training = {"workers": self.traces.cores, "slack": slack}
        with live_server(folder, OURS, sections={"training": training}, graphs=(GRAPH,)) as server:
            self._client.warm_up(self.traces.make(WARM_UP_RHO, seed)[1], server.target)
            for turn in range(self._options.turns):
                for trains in (False, True) if turn % 2 == 0 else (True, False):
                    row = {"slack": slack, "seed": seed, "turn": turn, "jobs": trains}
                    self._turn(server, row)

    def _turn(self, server: ServerProcess, about: dict[str, Any]) -> None:
        """Add a run at each load."""
        jobs = Jobs(server, self.traces.cores) if about["jobs"] else None
        alone = jobs.alone() if jobs is not None else 0.0
        for rho in self._options.rhos:
            trace, path = self.traces.make(rho, about["seed"])
            before = jobs.steps() if jobs is not None else None
            run, shares = self._client.run(path, server.target, server.pid)
            row = about | {"rho": rho, "disturbed": shares["disturbed"]}
            if jobs is not None and before is not None:
                row["steps_share"] = rate(before, jobs.steps()) / alone
            else:
                row["idle"] = 1 - sum(shares[f"cores_{who}"] for who in USERS)
            wait_for(lambda: answered(run) <= records(server.database).keys(), "all rows")  # noqa: B023
            kept = records(server.database)
            found = summary(trace, run, kept)
            row |= {name: found[name] for name in ("late_server", "missed")}
            row["handover_p99_ms"] = found["tails_ms"]["hand-over"]["p99"]
            told = accounts(trace, run, kept)
            row["run_over_estimate"] = run_over_estimate(told)
            self.runs.append((row, told))
        if jobs is not None:
            jobs.close()

    def accounting(self, slack: str, rho: float) -> Iterator[dict[str, Any]]:
        """Yield what jobs change in each part of a request's time."""
        found = {
            (row["seed"], row["turn"], row["jobs"]): told
            for row, told in self.runs
            if (row["slack"], row["rho"]) == (slack, rho)
        }
        pairs = [
            pair
            for seed, turn, jobs in found
            if jobs
            for pair in zip(found[seed, turn, False], found[seed, turn, True], strict=True)
        ]
        for row in compared(pairs):
            yield {"slack": slack, "rho": rho, **row}


def answered(run: LoadRun) -> set[str]:
    """Return the uids of the requests that were answered."""
    return {seen.request_uid for seen in run.seen if not seen.error}


def means(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield means over all runs of a rule and load, with the range of late answers.

    The runs without jobs of all rules count as one, `none`.
    """
    names = ("late_server", "missed", "handover_p99_ms", "run_over_estimate", "disturbed")
    for rho in dict.fromkeys(row["rho"] for row in rows):
        at = [row for row in rows if row["rho"] == rho]
        idle = fmean(row["idle"] for row in at if not row["jobs"])
        for slack in ("none", *dict.fromkeys(row["slack"] for row in at)):
            group = [row for row in at if (row["slack"] if row["jobs"] else "none") == slack]
            late = [row["late_server"] for row in group]
            yield {
                "slack": slack, "rho": rho, "idle": idle,
                **{name: fmean(row[name] for row in group) for name in names},
                "used": fmean(row.get("steps_share", 0.0) for row in group) / idle,
                "late_server_range": [min(late), max(late)],
            }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the runs, their means, and where time went."""
    with tempfile.TemporaryDirectory() as folder, load_process() as process:
        client = Undisturbed(process, slower_limit=math.inf)
        bench = TrainingBench(client, Path(folder), options)
        for seed in range(options.seeds):
            for slack in options.slack:
                bench.serve(slack, seed)
    rows = [row for row, _ in bench.runs]
    return {
        "workload": options.workload, "requests": options.requests,
        "solo_ms": bench.traces.solo_ms, "means": list(means(rows)),
        "accounting": [
            row for slack in options.slack for rho in options.rhos
            for row in bench.accounting(slack, rho)
        ],
        "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
