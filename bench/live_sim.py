"""The simulated twin of the live servers of ``bench.live``: same traces, same scheduler."""

import random
import statistics
from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from bench.live_setup import LEARN_RHO, OURS, QOS_FACTOR, Traces
from bench.open_loop import LoadRun
from serve.core.fleet import make_scheduler
from serve.core.params import LANES_PER_CORE
from serve.core.types import Completed, Estimate, Nanos
from serve.journal import decode
from serve.sim.engine import Simulation
from serve.sim.host import HostModel
from serve.sim.replay import budget_of, recorded
from serve.sim.report import summarize
from serve.sim.workload import BASELINES, make_system, offered
from serve.workload import Trace

#: Runs next to each other in length that count as alike.
ALIKE = 30
#: Until the simulated learned run is at the live one's pace.
FITS = 4


def host_model(
    cores: int, *, server_ns: float, client_ns: float, hear_ns: Nanos, told_ns: int
) -> HostModel:
    """Where the processor time of server and client goes, measured for each request.

    `told_ns` of the server's is what the journal shows between arrival and answer, `hear_ns` in it.
    The rest is transport and bookkeeping; half of it is taken to come before the arrival, as of the
    client's.
    """
    half_rest_ns = Nanos(round(max(0.0, server_ns - told_ns) / 2))
    half_client_ns = Nanos(round(client_ns / 2))
    return HostModel(cores, half_client_ns, half_client_ns, half_rest_ns, hear_ns, half_rest_ns)


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured ÷ solo run time, in the middle: of runs that were alone, and of the others."""

    alone: float
    beside: float

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]]) -> Self:
        """From (solo run time, run time, most others beside it)."""
        ratios: dict[bool, list[float]] = {False: [], True: []}
        for solo_ns, run_ns, others in runs:
            ratios[others > 0].append(run_ns / solo_ns)
        return cls(
            statistics.median(ratios[False] or [1.0]), statistics.median(ratios[True] or [1.0])
        )


def ran_ns(outcome: Completed) -> int:
    """On the lane, without standing suspended."""
    return outcome.usage.run_ns - outcome.timeline.suspended_ns


class Twin:
    """A device as one live run showed it to be."""

    def __init__(
        self,
        traces: Traces,
        journal: Path,
        learned: LoadRun,
        kept: Mapping[str, Mapping[str, Any]],
        cores: int,
        server_s: float,
    ) -> None:
        self._traces, self._cores = traces, cores
        with journal.open("rb") as lines:
            live = decode(lines, str(journal))
        self._budget_bytes = budget_of(live)
        recording = recorded(live)
        self._answer_ns = recording.answer_ns
        self._learned_trace, _ = traces.make(LEARN_RHO, 0)
        rows = [kept[seen.request_uid] for seen in learned.seen]
        #: (alone before, alone in the learned run ÷ alone before), short runs first.
        self._ratios: list[tuple[int, float]] = sorted(
            (traces.solo_of(item).run_ns, row["run_ns"] / traces.solo_of(item).run_ns)
            for item, row in zip(self._learned_trace.items, rows, strict=True)
            if row["co_runners"] == 0 and row["run_ns"] > 0
        )
        decode_ns = sorted(row["queue_ns"] for row in rows if not row["co_runners"])
        #: From a request's arrival until it is ready to run, when nothing else is there.
        self._before_ns = Nanos(decode_ns[len(decode_ns) // 2] + recording.prepare_ns)
        # Half of the hand-over is the way to the lane, half the server's hearing of the end.
        handed_ns = recording.device.launch_ns or 0
        hear_ns = Nanos(handed_ns // 2)
        host = host_model(
            cores,
            server_ns=server_s * 1e9 / len(learned.seen),
            client_ns=learned.cpu_s * 1e9 / len(learned.seen),
            hear_ns=hear_ns,
            told_ns=self._before_ns + recording.answer_ns + hear_ns,
        )
        self._device = replace(recording.device, launch_ns=Nanos(handed_ns - hear_ns), host=host)
        self._shapes = {
            (task.model, task.graph.num_nodes, task.graph.num_edges): solo.estimate
            for task, solo in traces.solo.items()
        }
        self._fit(
            Pace.of(
                (traces.solo_of(item).run_ns, row["run_ns"], row["co_runners"])
                for item, row in zip(self._learned_trace.items, rows, strict=True)
                if row["merged"] == 1 and row["run_ns"] > 0
            )
        )

    def _fit(self, live: Pace) -> None:
        """Have the simulated learned run at the pace of the live one.

        How long runs took there has in it what the host took from them, which the simulation takes
        again.
        """
        for _ in range(FITS):
            found = self._simulate(self._learned_trace, OURS).answered
            simulated = Pace.of(
                (row.task.estimate.run_ns, ran_ns(row.outcome), row.outcome.placement.co_runners)
                for row in found
                if isinstance(row.outcome, Completed)
            )
            factor = live.alone / simulated.alone
            self._ratios = [(run_ns, ratio * factor) for run_ns, ratio in self._ratios]
            beside = self._device.slowdown_beside(1) * live.beside / simulated.beside / factor
            self._device = replace(self._device, slowdown=(1.0, max(1.0, beside)))

    @property
    def facts(self) -> dict[str, Any]:
        """What was learned."""
        ordered = sorted(ratio for _, ratio in self._ratios)
        return {
            **asdict(self._device),
            "prepare_ns": self._before_ns,
            "answer_ns": self._answer_ns,
            "run_ratios": {q: ordered[len(ordered) * q // 100] for q in (5, 25, 50, 75, 95, 99)},
        }

    @property
    def solo_ms(self) -> dict[str, float]:
        """Quantiles of the solo times of all requests."""
        ordered = sorted(solo.solo_ns for solo in self._traces.solo.values())
        return {f"p{q}": ordered[len(ordered) * q // 100] / 1e6 for q in (5, 25, 50, 75, 95, 99)}

    def late(self, system: str, rho: float, seed: int) -> float:
        """Share late or refused, as the server would see it."""
        trace, _ = self._traces.make(rho, seed)
        report = summarize(self._simulate(trace, system).answered)
        missed = report.violations + report.requests - report.completed
        return missed / report.requests

    def _simulate(self, trace: Trace, system: str) -> Simulation:
        requests = [
            replace(
                request,
                run_ns=Nanos(round(request.run_ns * self._ratio(request.run_ns, item.seed))),
                prepare_ns=self._before_ns,
                answer_ns=self._answer_ns,
            )
            for item, request in zip(
                trace.items, offered(trace, self._estimate, QOS_FACTOR, (1.0,)), strict=True
            )
        ]
        policy, _, discipline = system.partition("+")
        params = make_system(
            policy, discipline or "rolling", cores=self._cores, budget_bytes=self._budget_bytes
        ).params
        if system in BASELINES:
            # As ``live_server`` has it: no more lanes than for the others.
            lane_ids = params.device.lane_ids[: LANES_PER_CORE * self._cores]
            params = replace(params, device=replace(params.device, lane_ids=lane_ids))
        simulation = Simulation(make_scheduler(params), self._device)
        simulation.run(requests)
        return simulation

    def _ratio(self, run_ns: int, seed: int) -> float:
        """How far off a run is: as one of those of about its length was."""
        place = bisect([known_ns for known_ns, _ in self._ratios], run_ns)
        around = self._ratios[max(0, place - ALIKE // 2) : place + ALIKE // 2]
        ratio: float = random.Random(seed).choice(around)[1]
        return ratio

    def _estimate(self, model: str, num_nodes: int, num_edges: int) -> Estimate:
        return self._shapes[model, num_nodes, num_edges]
