"""The run of a placed job: each task starts when all it waits for is there (the paper's OES).

Its promise, with ``sharing.equal`` or any sharing that gives no flow less: the run takes at most
``critical.competitive_ratio`` times as long as the best schedule of the same placement.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve.core.placement.job import Assignment, DistributedJob, JobRole, Volumes
from serve.core.placement.sharing import ActiveFlow, Sharing, equal, equal_parts

#: Bytes that rounding may leave of a flow.
_ROUNDING_BYTES = 1e-6
#: At one instant flows end before runs do.
_FLOW, _RUN = 0, 1


class PlayedRun(NamedTuple):
    """One run of a task."""

    task: int
    iteration: int
    began_s: float
    ended_s: float


class PlayedFlow(NamedTuple):
    """What a link sent between machines in one iteration."""

    link: int
    iteration: int
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class PlayedJob:
    """What became of a job."""

    makespan_s: float
    runs: tuple[PlayedRun, ...]
    flows: tuple[PlayedFlow, ...]
    #: By machine, the most flows that were active at once.
    most_in: tuple[int, ...]
    most_out: tuple[int, ...]


def played(
    job: DistributedJob,
    assignment: Assignment,
    volumes: Volumes,
    sharing: Sharing = equal,
    window: int | None = None,
) -> PlayedJob:
    """Run as many iterations as `volumes` has.

    Args:
        job: What runs.
        assignment: Where.
        volumes: What is sent, by link and iteration.
        sharing: How flows share the network.
        window: Iterations that stores may be ahead of all workers; None for any number, which takes
            memory without bound.
    """
    return _Player(job, assignment, volumes, sharing, window).play()


class _Player:
    """The state of one run."""

    def __init__(
        self,
        job: DistributedJob,
        assignment: Assignment,
        volumes: Volumes,
        sharing: Sharing,
        window: int | None,
    ) -> None:
        self._job, self._assignment, self._volumes = job, assignment, volumes
        self._sharing = sharing
        self._iterations = len(volumes[0]) if volumes else 1
        #: What each task waits for in its runs of later iterations.
        self._held = self._holds(window)
        self._crosses = [job.crosses(link, assignment) for link in job.links]
        #: (time, kind, order of entry, what): runs that end, and flows that end at today's rates.
        self._due: list[tuple[float, int, int, Any]] = []
        self._entries = 0
        #: Flows that are sent, by link, and those behind them.
        self._active: dict[int, ActiveFlow] = {}
        self._behind: dict[int, deque[tuple[int, float, int]]] = {}
        #: By machine, the flows that go out and that come in, by link; and of which machines these
        #: have changed.
        self._going: list[dict[int, ActiveFlow]] = [{} for _ in job.machines]
        self._coming: list[dict[int, ActiveFlow]] = [{} for _ in job.machines]
        self._senders: set[int] = set()
        self._receivers: set[int] = set()
        self._out_bytes_s = [machine.out_bytes_s for machine in job.machines]
        self._in_bytes_s = [machine.in_bytes_s for machine in job.machines]
        self._began: dict[tuple[int, int], float] = {}
        self._runs: list[PlayedRun] = []
        self._flows: list[PlayedFlow] = []
        self._most_in = [0] * len(job.machines)
        self._most_out = [0] * len(job.machines)

    def _holds(self, window: int | None) -> list[list[int]]:
        """Return how many things each run of each task waits for."""
        job, count = self._job, self._iterations
        shifts = [[job.links[number].shift for number in numbers] for numbers in job.incoming]
        self._workers = [n for n, task in enumerate(job.tasks) if task.role is JobRole.WORKER]
        self._stores = [n for n, task in enumerate(job.tasks) if task.role is JobRole.STORE]
        self._window = window if window is not None and self._workers else count
        held = [
            [(n > 0) + sum(n >= shift for shift in of_task) for n in range(count)]
            for of_task in shifts
        ]
        for store in self._stores:
            for n in range(self._window, count):
                held[store][n] += len(self._workers)
        return held

    def play(self) -> PlayedJob:
        """Let everything happen, and return what did."""
        for task in range(len(self._job.tasks)):
            if not self._held[task][0]:
                self._begin(task, 0, 0.0)
        while self._due:
            now_s = self._due[0][0]
            while self._due and self._due[0][0] <= now_s:
                _, kind, entry, what = heapq.heappop(self._due)
                if kind == _RUN:
                    self._run_ended(what[0], what[1], now_s)
                elif what.entry == entry:  # else its rate has changed since
                    self._flow_ended(what, now_s)
            if self._senders:
                self._share(now_s)
        makespan_s = max((run.ended_s for run in self._runs), default=0.0)
        return PlayedJob(
            makespan_s, tuple(self._runs), tuple(self._flows),
            tuple(self._most_in), tuple(self._most_out),
        )  # fmt: skip

    def _begin(self, task: int, iteration: int, now_s: float) -> None:
        self._began[task, iteration] = now_s
        run_s = self._job.tasks[task].run_s[self._assignment[task]]
        self._entries += 1
        heapq.heappush(self._due, (now_s + run_s, _RUN, self._entries, (task, iteration)))

    def _release(self, task: int, iteration: int, now_s: float) -> None:
        """Count off one of the things that a run waits for."""
        if iteration >= self._iterations:
            return
        self._held[task][iteration] -= 1
        if not self._held[task][iteration]:
            self._begin(task, iteration, now_s)

    def _run_ended(self, task: int, iteration: int, now_s: float) -> None:
        self._runs.append(PlayedRun(task, iteration, self._began.pop((task, iteration)), now_s))
        self._release(task, iteration + 1, now_s)
        for number in self._job.outgoing[task]:
            link = self._job.links[number]
            if iteration + link.shift >= self._iterations:
                continue
            if not self._crosses[number]:
                self._release(link.target, iteration + link.shift, now_s)
                continue
            self._entries += 1
            self._behind.setdefault(number, deque()).append((iteration, now_s, self._entries))
            if number not in self._active:
                self._send(number, now_s)
        if self._job.tasks[task].role is JobRole.WORKER:
            for store in self._stores:
                self._release(store, iteration + self._window, now_s)

    def _send(self, number: int, now_s: float) -> None:
        """Begin with the next flow of a link: of one pair of tasks at most one is active."""
        link = self._job.links[number]
        iteration, ready_s, entry = self._behind[number].popleft()
        flow = ActiveFlow(
            number, iteration, self._assignment[link.source], self._assignment[link.target],
            (link.target, iteration + link.shift), self._volumes[number][iteration],
            (ready_s, entry), now_s, now_s,
        )  # fmt: skip
        self._active[number] = flow
        self._going[flow.source][number] = flow
        self._coming[flow.target][number] = flow
        self._change(flow)

    def _change(self, flow: ActiveFlow) -> None:
        self._senders.add(flow.source)
        self._receivers.add(flow.target)

    def _flow_ended(self, flow: ActiveFlow, now_s: float) -> None:
        del self._active[flow.link]
        del self._going[flow.source][flow.link]
        del self._coming[flow.target][flow.link]
        self._flows.append(PlayedFlow(flow.link, flow.iteration, flow.began_s, now_s))
        self._change(flow)
        if self._behind[flow.link]:
            self._send(flow.link, now_s)
        self._release(*flow.waits, now_s)

    def _share(self, now_s: float) -> None:
        """Share the network anew after flows began or ended."""
        for machine in self._senders:
            self._most_out[machine] = max(self._most_out[machine], len(self._going[machine]))
        for machine in self._receivers:
            self._most_in[machine] = max(self._most_in[machine], len(self._coming[machine]))
        for flow, rate in self._rates(now_s):
            if rate == flow.rate and flow.left_bytes > _ROUNDING_BYTES:
                continue
            flow.count(now_s)
            flow.rate = rate
            self._entries += 1
            flow.entry = self._entries
            if rate > 0 or flow.left_bytes <= _ROUNDING_BYTES:
                left_s = flow.left_bytes / rate if flow.left_bytes > _ROUNDING_BYTES else 0.0
                heapq.heappush(self._due, (now_s + left_s, _FLOW, self._entries, flow))
        self._senders.clear()
        self._receivers.clear()

    def _rates(self, now_s: float) -> Iterable[tuple[ActiveFlow, float]]:
        """Return the flows whose rate may have changed, each with its rate."""
        machines = self._job.machines
        if self._sharing is not equal:
            flows = list(self._active.values())
            for flow in flows:
                flow.count(now_s)
            return zip(flows, self._sharing(flows, machines), strict=True)
        # Only flows beside one that began or ended, of which there are few on many machines.
        beside: dict[int, ActiveFlow] = {}
        for machine in self._senders:
            beside |= self._going[machine]
        for machine in self._receivers:
            beside |= self._coming[machine]
        out_parts = equal_parts(self._out_bytes_s, map(len, self._going))
        in_parts = equal_parts(self._in_bytes_s, map(len, self._coming))
        return [
            (flow, min(out_parts[flow.source], in_parts[flow.target])) for flow in beside.values()
        ]
