"""A simulated twin of the live servers of ``bench.live.live``: same traces, same scheduler.

The twin of a load is learned from one live run of our system at that load: how far runs and their
estimates are off the time measured alone, by size; the slowdown beside other runs; hand-over,
preparing and answering, from the journal; and the processor time of server and client for a
request. Nothing is fitted to the traces and systems that it then simulates.
"""

import random
import statistics
from bisect import bisect
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from bench.kit.live_setup import OURS, Traces
from bench.kit.open_loop import LoadRun
from bench.scheduling.site import missed_share
from serve.core.fleet.fleet import make_scheduler
from serve.core.params import LANES_PER_CORE
from serve.core.types import Bytes, Completed, LaneId, Nanos, TaskEstimate
from serve.journal import Journal
from serve.sim.device import Offered
from serve.sim.engine import Simulation
from serve.sim.host import HostModel
from serve.sim.replay import budget_of, recorded
from serve.sim.report import Answered, summarize
from serve.sim.workload import BASELINES, make_system, task_of
from serve.workload import Trace, TraceItem

#: Runs of about the same length, from which one is drawn.
ALIKE = 30
#: Iterations until the simulated learned run has the live one's pace.
FITS = 8
#: Fields of a record, in the order of `Known`.
_KNOWN_OF_ROW = ("run_ns", "run_estimate_ns", "co_runners")


def host_model(
    cores: int, *, server_ns: float, client_ns: float, hear_ns: Nanos, told_ns: int
) -> HostModel:
    """Return when server and client need the processor time that was measured for a request.

    The journal shows `told_ns` of the server's time between arrival and answer, `hear_ns` of it
    after the run. The rest is transport and bookkeeping; half of it is assumed to come before the
    arrival, and so is half of the client's time.
    """
    half_rest_ns = Nanos(round(max(0.0, server_ns - told_ns) / 2))
    half_client_ns = Nanos(round(client_ns / 2))
    return HostModel(cores, half_client_ns, half_client_ns, half_rest_ns, hear_ns, half_rest_ns)


@dataclass(frozen=True, slots=True)
class Learned:
    """A live run of our system that a twin is learned from."""

    trace: Trace
    run: LoadRun
    #: Processor time of the server's main process; begin and end of the run on its clock.
    server_s: float
    from_ns: int
    to_ns: int

    def part_of(self, journal: Journal) -> Journal:
        """Return the journal's rows of this run."""
        rows = tuple(row for row in journal.rows if self.from_ns <= row.at_ns <= self.to_ns)
        return replace(journal, rows=rows)


@dataclass(frozen=True, slots=True)
class Known:
    """A request of the learned run, with its run time when it was measured alone."""

    solo_run_ns: int
    run_ns: int
    estimate_ns: int
    others: int


@dataclass(frozen=True, slots=True)
class Pace:
    """Medians of measured ÷ solo run time: of all runs, of those alone, of the others."""

    all: float
    alone: float
    beside: float

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]]) -> Self:
        """Return the pace of runs given as (solo run time, run time, most others beside it)."""
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for solo_ns, run_ns, others in runs:
            ratios[others > 0].append(run_ns / solo_ns)
        alone, beside = ratios[False], ratios[True]
        middle = (statistics.median(some or [1.0]) for some in (alone + beside, alone, beside))
        return cls(*middle)


def ran_ns(outcome: Completed) -> int:
    """Return the time on the lane without suspension."""
    return max(0, outcome.usage.run_ns - outcome.timeline.suspended_ns)


def waits_ns(answered: Iterable[Answered]) -> dict[str, list[int]]:
    """Return the hand-over and the answer of every completed request."""
    found: dict[str, list[int]] = {"hand-over": [], "answer": []}
    for row in answered:
        if isinstance(row.outcome, Completed):
            times = row.outcome.timeline
            on_lane_ns = times.finished_ns - times.launched_ns - times.suspended_ns
            found["hand-over"].append(on_lane_ns - ran_ns(row.outcome))
            found["answer"].append(row.answered_ns - times.finished_ns)
    return found


class Twin:
    """The device of one load.

    Each load has a twin of its own: under more load caches and cores are warmer, and a request
    takes half the processor time at ρ 0.5 of what it takes at 0.1, in the lanes and in the host.
    """

    def __init__(
        self,
        traces: Traces,
        journal: Journal,
        learned: Learned,
        kept: Mapping[str, Mapping[str, Any]],
        cores: int,
    ) -> None:
        self._traces, self._cores = traces, cores
        self._budget_bytes = budget_of(journal)
        recording = recorded(learned.part_of(journal))
        self._answer_ns = recording.answer_ns
        self._learned = learned.trace
        count = len(learned.run.seen)
        rows = [kept[seen.request_uid] for seen in learned.run.seen]
        #: By solo run time, ascending.
        self._known = sorted(
            (
                Known(traces.solo_of(item).run_ns, *map(row.__getitem__, _KNOWN_OF_ROW))
                for item, row in zip(self._learned.items, rows, strict=True)
                if row["merged"] == 1 and row["run_ns"] > 0
            ),
            key=lambda known: known.solo_run_ns,
        )
        decode_ns = [row["queue_ns"] for row in rows if not row["co_runners"]] or [0]
        #: From a request's arrival until it is ready to run on an idle server.
        self._before_ns = Nanos(round(statistics.median(decode_ns)) + recording.prepare_ns)
        # Half of the hand-over is the way to the lane, half the way of the end to the server.
        handed_ns = recording.device.launch_ns or 0
        hear_ns = Nanos(handed_ns // 2)
        host = host_model(
            cores,
            server_ns=learned.server_s * 1e9 / count,
            client_ns=learned.run.cpu_s * 1e9 / count,
            hear_ns=hear_ns,
            told_ns=self._before_ns + recording.answer_ns + hear_ns,
        )
        self._device = replace(recording.device, launch_ns=Nanos(handed_ns - hear_ns), host=host)
        #: True ÷ learned run time; see `_fit`.
        self._factor = 1.0
        self._fit()

    def _fit(self) -> None:
        """Scale run times until the simulated learned run has the pace of the live one.

        Live run times include what the host took from the runs, and the simulation takes it again.
        """
        live = Pace.of((known.solo_run_ns, known.run_ns, known.others) for known in self._known)
        beside = live.beside / live.alone
        for _ in range(FITS):
            self._device = replace(self._device, slowdown=(1.0, max(1.0, beside)))
            simulated = Pace.of(
                (
                    self._traces.solo_of(self._learned.items[row.task.task_id - 1]).run_ns,
                    ran_ns(row.outcome),
                    row.outcome.placement.co_runners,
                )
                for row in self._simulate(self._learned, OURS).answered
                if isinstance(row.outcome, Completed)
            )
            self._factor *= live.all / simulated.all
            beside *= live.beside / live.alone * simulated.alone / simulated.beside

    @property
    def facts(self) -> dict[str, Any]:
        """Return what was learned, for the result."""
        ratios = sorted(known.run_ns / known.solo_run_ns for known in self._known)
        return {
            **asdict(self._device),
            "prepare_ns": self._before_ns,
            "answer_ns": self._answer_ns,
            "run_ratios": {q: ratios[len(ratios) * q // 100] for q in (5, 25, 50, 75, 95, 99)},
            "run_factor": self._factor,
        }

    def with_host(self, share: float) -> Self:
        """Return a twin whose host takes that share of the processor time for its work."""
        twin = copy(self)
        host = self._device.host
        assert host is not None
        twin._device = replace(self._device, host=host.taking(share))
        twin._before_ns = Nanos(round(self._before_ns * share))
        twin._answer_ns = Nanos(round(self._answer_ns * share))
        return twin

    def late(self, system: str, rho: float, seed: int) -> float:
        """Return the share late or refused by the server's clock."""
        return missed_share(summarize(self.answered(system, rho, seed)))

    def answered(self, system: str, rho: float, seed: int) -> list[Answered]:
        """Return every request of a trace at its end."""
        trace, _ = self._traces.make(rho, seed)
        return self._simulate(trace, system).answered

    def _simulate(self, trace: Trace, system: str) -> Simulation:
        requests = [self._offered(number, item) for number, item in enumerate(trace.items, 1)]
        policy, _, discipline = system.partition("+")
        params = make_system(
            policy, discipline or "rolling", cores=self._cores, budget_bytes=self._budget_bytes
        ).params
        # A live scheduler has measured the slowdown too.
        params = replace(params, device=replace(params.device, slowdown=self._device.slowdown))
        if system in BASELINES:
            # As in ``bench.kit.live_server``: as many lanes, used from the last core on.
            lanes = LANES_PER_CORE * self._cores
            first = self._cores - 1
            count = min(BASELINES[system] or lanes, lanes)
            lane_ids = tuple(LaneId(lane) for lane in range(first, first + count))
            params = replace(params, device=replace(params.device, lane_ids=lane_ids))
        simulation = Simulation(make_scheduler(params), self._device)
        simulation.run(requests)
        return simulation

    def _offered(self, number: int, item: TraceItem) -> Offered:
        """Return the request, with run time and estimate scaled as of a known similar one."""
        solo = self._traces.solo_of(item)
        place = bisect(self._known, solo.run_ns, key=lambda known: known.solo_run_ns)
        alike = self._known[max(0, place - ALIKE // 2) : place + ALIKE // 2]
        known = random.Random(item.seed).choice(alike)
        slowdown = self._device.slowdown_beside(known.others)
        run_ns = solo.run_ns * known.run_ns / known.solo_run_ns / slowdown * self._factor
        estimated_ns = round(solo.run_ns * known.estimate_ns / known.solo_run_ns)
        estimate = TaskEstimate(
            Bytes(solo.peak_bytes), Bytes(solo.reserve_bytes), Nanos(max(1, estimated_ns)),
            Nanos(max(1, estimated_ns + solo.solo_ns - solo.run_ns)),
        )  # fmt: skip
        assert item.qos_target_us is not None
        task = task_of(number, item, estimate, item.qos_target_us * 1000)
        return Offered(task, Nanos(max(1, round(run_ns))), self._before_ns, self._answer_ns)
