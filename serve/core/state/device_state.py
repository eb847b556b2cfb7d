"""State of one device that decisions are based on: plan, lanes, memory and progress.

Disciplines read a ``Board`` and propose one move at a time; only the scheduler changes it.
"""

from collections import deque
from collections.abc import Iterable, Set
from operator import attrgetter

from serve.core.params import DeviceFacts
from serve.core.policies.base import Contender, Policy
from serve.core.slowdown import slowdown_beside
from serve.core.state.job_time import JobTime
from serve.core.state.ledger import Ledger
from serve.core.state.ordered import Key
from serve.core.state.plan import Plan
from serve.core.state.record import Record, Run
from serve.core.types import ZERO_NS, LaneId, Nanos, Task, TaskEstimate
from serve.errors import InvariantViolation

#: How a task stands beside others, whatever the policy ranks.
_FIRST, _AS_RANKED, _LAST = range(3)
_by_key = attrgetter("key")
_NO_LANES: frozenset[LaneId] = frozenset()


class Board:
    """Plan, lanes and memory."""

    __slots__ = (
        "_arrange",
        "_at_ns",
        "_by_executing",
        "_co_run_ns",
        "_full_slowdown",
        "_history",
        "_rank_task",
        "_slowdown_now",
        "_work_ns",
        "busy",
        "can_suspend",
        "domain_of",
        "executing_count",
        "idle",
        "idle_in",
        "job_time",
        "launch_ns",
        "ledger",
        "max_slots",
        "plan",
        "slots",
        "slowdown",
        "weighs_slowdown",
    )

    def __init__(self, device: DeviceFacts, plan: Plan, policy: Policy) -> None:
        self.plan = plan
        self.ledger = Ledger(device.budget_bytes)
        self.can_suspend = device.can_suspend
        self.launch_ns = device.launch_ns
        #: Whether who executes decides if one more is launched; see ``company``.
        self.weighs_slowdown = policy.weighs_slowdown and not device.can_suspend
        #: By number of others that execute; see ``DeviceFacts``.
        self.slowdown = device.slowdown
        #: Lanes that are up and hold nothing.
        self.idle: set[LaneId] = set()
        #: Trust domain of each lane that has one; see ``own_lanes``.
        self.domain_of: dict[LaneId, str] = {}
        #: Idle lanes by trust domain; without domains one and the same set.
        self.idle_in: dict[str, set[LaneId]] = {"": self.idle}
        #: What each busy lane holds, executing or suspended.
        self.busy: dict[LaneId, Run] = {}
        self.executing_count = 0
        #: Up to `_at_ns`: work that a run which always executed would have done, and the time that
        #: others would have executed beside it, summed over them. All that execute advance alike.
        self._work_ns = self._co_run_ns = 0
        self._at_ns = Nanos(0)
        self.job_time = JobTime()
        #: Tasks that may execute at once when every lane is up.
        self.max_slots = device.slots
        #: By number of those that execute, and now.
        self._by_executing = self._slowdowns()
        self._slowdown_now = 1.0
        #: Tasks that may execute at once on the lanes that are up; at least 1, to plan for.
        self.slots = 1
        #: The same when all slots execute.
        self._full_slowdown = self._by_executing[-1]
        self._arrange = policy.arrange
        self._rank_task = policy.rank
        #: Since when each (free slots, free memory) held. Long enough to look back over one
        #: prepare; older entries are lost, and a wait that began before them is cut short.
        self._history: deque[tuple[Nanos, int, int]] = deque(maxlen=64)

    @property
    def lanes_up(self) -> int:
        """Lanes that can work."""
        return len(self.idle) + len(self.busy)

    @property
    def open_slots(self) -> int:
        """Tasks that could execute beside those that do."""
        return self.max_slots - self.executing_count

    @property
    def free_slots(self) -> int:
        """Tasks that could be launched now if memory allows."""
        lanes, slots = len(self.idle), self.max_slots - self.executing_count
        return lanes if lanes < slots else slots

    @property
    def available_bytes(self) -> int:
        """Memory not reserved; negative after the budget was lowered below its use."""
        return self.ledger.available_bytes

    def rank(self, record: Record, left_ns: Nanos, now_ns: Nanos) -> tuple[int, Key]:
        """Return how urgent the record is with `left_ns` of run time left; smaller first.

        The policy says so, except that one promoted for waiting too long goes first and one
        that is answered already goes last. The time left, as alone, is taken as it will be beside
        as many others as there are slots for.
        """
        left_ns = self._slowed_ns(left_ns)
        standing = _FIRST if record.promoted else _LAST if record.state.answered else _AS_RANKED
        return standing, self._rank_task(record.task, left_ns, now_ns)

    def _slowed_ns(self, left_ns: Nanos) -> Nanos:
        pace = self._full_slowdown
        return left_ns if pace == 1.0 else Nanos(int(left_ns * pace))

    def urgent_first(self, joining: Record | None, now_ns: Nanos) -> "list[Run | Record]":
        """Return runs on lanes, and one record that could join, in the order of getting slots.

        A run is as urgent as its most urgent member.
        """
        rank, pace = self._rank_task, self._full_slowdown
        done_ns = self._work_ns + self._work_since(now_ns)
        ranked: list[Contender] = []
        apart: list[tuple[int, Key, Run | Record]] = []
        holders: Iterable[Run | Record] = self.busy.values()
        if joining is not None:
            holders = [*holders, joining]
        for holder in holders:
            if isinstance(holder, Run):
                left_ns, record = _left_ns(holder, done_ns), holder.members[0]
                if len(holder.members) > 1:
                    record = min(holder.members, key=lambda one: self.rank(one, left_ns, now_ns))
            else:
                left_ns, record = holder.task.estimate.run_ns, holder
            if pace != 1.0:
                left_ns = Nanos(int(left_ns * pace))
            key = rank(record.task, left_ns, now_ns)
            if record.promoted or record.state.answered:
                apart.append((_FIRST if record.promoted else _LAST, key, holder))
            else:
                ranked.append(Contender(key, left_ns, holder))
        ranked.sort(key=_by_key)
        order = [one.holder for one in self._arrange(ranked, self.max_slots, now_ns)]
        if apart:
            apart.sort()
            order[:0] = [holder for standing, _, holder in apart if standing == _FIRST]
            order += [holder for standing, _, holder in apart if standing == _LAST]
        return order

    def idle_for(self, task: Task) -> Set[LaneId]:
        """Return the lanes that hold nothing and may run the task."""
        return self.idle_in.get(task.domain, _NO_LANES)

    def _set_idle(self, lane_id: LaneId) -> None:
        self.idle.add(lane_id)
        self.idle_in[self.domain_of.get(lane_id, "")].add(lane_id)

    def _set_not_idle(self, lane_id: LaneId) -> None:
        self.idle.discard(lane_id)
        self.idle_in[self.domain_of.get(lane_id, "")].discard(lane_id)

    def add_lane(self, lane_id: LaneId, domain: str) -> None:
        """Know a further lane, which is not up yet, for tasks of that trust domain alone."""
        if not self.domain_of:
            self.idle_in = {"": set(self.idle)}
        self.domain_of[lane_id] = domain
        self.idle_in.setdefault(domain, set())

    def remove_lane(self, lane_id: LaneId) -> None:
        """Forget a lane of a trust domain, which holds nothing."""
        self.lane_down(lane_id)
        domain = self.domain_of.pop(lane_id)
        if domain not in self.domain_of.values():
            del self.idle_in[domain]
        if not self.domain_of:
            self.idle_in = {"": self.idle}

    def lane_up(self, lane_id: LaneId) -> None:
        """Count the lane, which was down, as able to take a run."""
        self._set_idle(lane_id)
        self._count_slots()

    def lane_down(self, lane_id: LaneId) -> None:
        """Count the lane, which holds nothing, as unable to take a run."""
        self._set_not_idle(lane_id)
        self._count_slots()

    def _count_slots(self) -> None:
        self.slots = max(1, min(self.max_slots, self.lanes_up))

    def occupy(self, members: tuple[Record, ...], estimate: TaskEstimate, now_ns: Nanos) -> Run:
        """Give the members an idle lane of their domain, their memory, and a slot to execute in."""
        lane_id = min(self.idle_for(members[0].task))
        run_ns = estimate.run_ns
        task_id, reserve_bytes = members[0].task.task_id, estimate.reserve_bytes
        run = Run(task_id, members, lane_id, run_ns, reserve_bytes, now_ns, run_ns, False)
        # Tasks that share inputs run by themselves.
        self.ledger.reserve(task_id, reserve_bytes, members[0].task.block)
        self._set_not_idle(lane_id)
        self.busy[lane_id] = run
        self._execute(run, now_ns)
        return run

    def suspend(self, run: Run, now_ns: Nanos) -> None:
        """Take the slot from the run, which keeps its lane and memory."""
        self._rest(run, now_ns)
        run.stopped_ns = now_ns

    def resume(self, run: Run, now_ns: Nanos) -> None:
        """Give the run a slot again."""
        run.suspended_ns = run.stood_ns(now_ns)
        self._execute(run, now_ns)

    def vacate(self, run: Run, now_ns: Nanos) -> None:
        """Take lane and memory back from the run, and its slot if it was executing."""
        if self.busy.pop(run.lane_id, None) is not run:
            raise InvariantViolation(f"task {run.task_id} is not on lane {run.lane_id}")
        self.ledger.give_back(run.task_id)
        if run.executing:
            self._rest(run, now_ns)
        self._set_idle(run.lane_id)

    def note(self, now_ns: Nanos) -> None:
        """Remember what is free from now on."""
        slots, available_bytes, history = self.free_slots, self.available_bytes, self._history
        if not history or history[-1][2] != available_bytes or history[-1][1] != slots:
            history.append((now_ns, slots, available_bytes))

    def waited_for_ns(self, record: Record, now_ns: Nanos) -> Nanos:
        """Return how long lane and memory stood free for the record while it was prepared."""
        if record.prepared_ns != now_ns:
            return ZERO_NS
        need_bytes, after_ns = self.ledger.need_bytes(record.task), record.prepare_started_ns
        since_ns = now_ns
        for start_ns, slots, available_bytes in reversed(self._history):
            if slots < 1 or available_bytes < need_bytes:
                break
            if start_ns <= after_ns:
                since_ns = after_ns
                break
            since_ns = start_ns
        if since_ns < self.plan.cleared_ns:
            since_ns = self.plan.cleared_ns
        return Nanos(now_ns - since_ns) if now_ns > since_ns else ZERO_NS

    def left_ns(self, run: Run, now_ns: Nanos) -> Nanos:
        """Return the estimated time alone that the run still needs, always more than 0."""
        return _left_ns(run, self._work_ns + self._work_since(now_ns))

    def co_run_ns(self, run: Run, now_ns: Nanos) -> Nanos:
        """Return how long others have executed beside the run, summed over them."""
        if not run.executing:
            return Nanos(run.co_run_ns)
        since_ns = (self.executing_count - 1) * (now_ns - self._at_ns)
        return Nanos(run.co_run_ns + self._co_run_ns + since_ns)

    def set_slowdown(self, slowdown: tuple[float, ...], now_ns: Nanos) -> None:
        """Set how runs slow one another from now on."""
        self._advance(now_ns)
        self.slowdown = slowdown
        self._by_executing = self._slowdowns()
        self._full_slowdown = self._by_executing[-1]
        self._slowdown_now = self._by_executing[self.executing_count]

    def _slowdowns(self) -> list[float]:
        """Return the slowdown of each run by number of runs that execute."""
        others = range(self.max_slots)
        return [1.0, *(slowdown_beside(self.slowdown, beside) for beside in others)]

    def _execute(self, run: Run, now_ns: Nanos) -> None:
        """Count the run among those that execute, and all of them as each other's company."""
        self._advance(now_ns)
        run.executing = True
        run.mark_ns += self._work_ns
        run.co_run_ns -= self._co_run_ns
        run.job_run_ns -= self.job_time.total_ns(now_ns)
        beside = self.executing_count
        self.executing_count = beside + 1
        self._slowdown_now = self._by_executing[beside + 1]
        if beside:
            for other in self.busy.values():
                if other.co_runners < beside and other.executing:
                    other.co_runners = beside
        if run.co_runners < beside:
            run.co_runners = beside

    def _rest(self, run: Run, now_ns: Nanos) -> None:
        """Remove the run from those that execute."""
        self._advance(now_ns)
        run.executing = False
        run.mark_ns -= self._work_ns
        run.co_run_ns += self._co_run_ns
        run.job_run_ns += self.job_time.total_ns(now_ns)
        self.executing_count -= 1
        self._slowdown_now = self._by_executing[self.executing_count]

    def _advance(self, now_ns: Nanos) -> None:
        """Count up to now at the pace so far; who executes is about to change."""
        passed_ns = now_ns - self._at_ns
        if not passed_ns:
            return
        pace = self._slowdown_now
        self._work_ns += passed_ns if pace == 1.0 else int(passed_ns / pace)
        if self.executing_count > 1:
            self._co_run_ns += (self.executing_count - 1) * passed_ns
        self._at_ns = now_ns

    def _work_since(self, now_ns: Nanos) -> int:
        """Return the work that each executing run has done since the last count."""
        passed_ns = now_ns - self._at_ns
        return passed_ns if self._slowdown_now == 1.0 else int(passed_ns / self._slowdown_now)


def _left_ns(run: Run, done_ns: int) -> Nanos:
    """Return what the run still needs when one that always executed has done `done_ns`."""
    if run.stopping:
        return Nanos(1)
    left_ns = run.mark_ns - done_ns if run.executing else run.mark_ns
    if left_ns > 0:
        return Nanos(left_ns)
    # Up to twice its estimate a run is within the spread of estimates and may end at any moment:
    # to give it more would have runs suspended that end in time. Beyond, what it has taken says
    # more than the estimate. Run times of such processes have heavy tails: half of those that
    # have reached an age reach twice that age (Harchol-Balter and Downey, "Exploiting Process
    # Lifetime Distributions for Dynamic Load Balancing", ACM TOCS 15(3), 1997). So it is expected
    # to need as long again as it has taken beyond twice its estimate.
    return Nanos(max(1, -left_ns - run.run_ns))
