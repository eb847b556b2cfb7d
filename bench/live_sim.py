"""The simulated twin of the live servers of ``bench.live``: same traces, same scheduler."""

import random
from bisect import bisect
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.live_setup import QOS_FACTOR, Traces
from bench.open_loop import LoadRun
from serve.core.types import Estimate, Nanos
from serve.journal import decode
from serve.sim.engine import simulate
from serve.sim.host import HostModel
from serve.sim.replay import budget_of, recorded
from serve.sim.workload import BASELINES, make_system, offered

#: Runs next to each other in length that count as alike.
ALIKE = 30


def host_model(cores: int, *, server_ns: float, client_ns: float, told_ns: int) -> HostModel:
    """Where the processor time of server and client goes, measured for each request.

    `told_ns` of the server's is what the journal shows between arrival and answer. The rest is
    transport and bookkeeping; half of it is taken to come before the arrival, as of the client's.
    """
    rest_ns = max(0.0, server_ns - told_ns)
    half_rest_ns, half_client_ns = Nanos(round(rest_ns / 2)), Nanos(round(client_ns / 2))
    return HostModel(cores, half_client_ns, half_client_ns, half_rest_ns, half_rest_ns)


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
        trace, _ = traces.make(0.3, 0)
        rows = [kept[seen.request_uid] for seen in learned.seen]
        #: (alone before, alone in the learned run ÷ alone before), short runs first.
        self._ratios: list[tuple[int, float]] = sorted(
            (traces.solo_of(item).run_ns, row["run_ns"] / traces.solo_of(item).run_ns)
            for item, row in zip(trace.items, rows, strict=True)
            if row["co_runners"] == 0 and row["run_ns"] > 0
        )
        decode_ns = sorted(row["queue_ns"] for row in rows if not row["co_runners"])
        #: From a request's arrival until it is ready to run, when nothing else is there.
        self._before_ns = Nanos(decode_ns[len(decode_ns) // 2] + recording.prepare_ns)
        host = host_model(
            cores,
            server_ns=server_s * 1e9 / len(learned.seen),
            client_ns=learned.cpu_s * 1e9 / len(learned.seen),
            told_ns=self._before_ns + recording.answer_ns,
        )
        self._device = replace(recording.device, host=host)
        self._shapes = {
            (task.model, task.graph.num_nodes, task.graph.num_edges): solo.estimate
            for task, solo in traces.solo.items()
        }

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
        made = make_system(
            policy, discipline or "rolling", cores=self._cores, budget_bytes=self._budget_bytes
        )
        device = self._device
        if system in BASELINES:
            # More than cores share them; those that do not are as slow beside others as learned.
            beside = device.slowdown_beside(self._cores - 1)
            slowdown = tuple(
                max(device.slowdown_beside(k), beside * (k + 1) / self._cores) for k in range(64)
            )
            device = replace(device, slowdown=slowdown)
        report = simulate(requests, made.params, device)
        missed = report.violations + report.requests - report.completed
        return missed / report.requests

    def _ratio(self, run_ns: int, seed: int) -> float:
        """How far off a run is: as one of those of about its length was."""
        place = bisect([known_ns for known_ns, _ in self._ratios], run_ns)
        around = self._ratios[max(0, place - ALIKE // 2) : place + ALIKE // 2]
        ratio: float = random.Random(seed).choice(around)[1]
        return ratio

    def _estimate(self, model: str, num_nodes: int, num_edges: int) -> Estimate:
        return self._shapes[model, num_nodes, num_edges]
