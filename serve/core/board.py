"""What is decided on: the plan, the lanes and the memory at one moment.

Disciplines read a ``Board`` and propose one move at a time; only the scheduler changes it.
"""

from collections import deque
from collections.abc import Callable

from serve.core.ledger import Ledger
from serve.core.ordered import Key
from serve.core.params import DeviceFacts
from serve.core.plan import Plan, Record
from serve.core.types import LaneId, Nanos, Task
from serve.errors import InvariantViolation

#: How urgent a task is with so much run time left, now: smaller first.
RankTask = Callable[[Task, Nanos, Nanos], Key]


class Board:
    """Plan, lanes and memory."""

    __slots__ = (
        "_history",
        "_max_slots",
        "_rank_task",
        "busy",
        "can_suspend",
        "executing_count",
        "idle",
        "ledger",
        "plan",
    )

    def __init__(self, device: DeviceFacts, plan: Plan, rank_task: RankTask) -> None:
        self.plan = plan
        self.ledger = Ledger(device.budget_bytes)
        self.can_suspend = device.can_suspend
        #: Lanes that are up and hold nothing.
        self.idle: set[LaneId] = set()
        #: What each busy lane holds, executing or suspended.
        self.busy: dict[LaneId, Record] = {}
        self.executing_count = 0
        self._max_slots = device.slots
        self._rank_task = rank_task
        #: Since when each (free slots, free memory) held. Long enough to look back over one
        #: prepare; older entries are lost, and a wait that began before them is cut short.
        self._history: deque[tuple[Nanos, int, int]] = deque(maxlen=64)

    @property
    def slots(self) -> int:
        """Tasks that may execute at once on the lanes that are up; at least 1, to plan for."""
        return max(1, min(self._max_slots, len(self.idle) + len(self.busy)))

    @property
    def open_slots(self) -> int:
        """Tasks that could execute beside those that do."""
        return self._max_slots - self.executing_count

    @property
    def free_slots(self) -> int:
        """Tasks that could be launched now if memory allows."""
        lanes, slots = len(self.idle), self._max_slots - self.executing_count
        return lanes if lanes < slots else slots

    @property
    def available_bytes(self) -> int:
        """Memory not reserved; negative after the budget was lowered below its use."""
        return self.ledger.available_bytes

    def left_ns(self, record: Record, now_ns: Nanos) -> Nanos:
        """Estimated run time the record still needs, always more than 0."""
        run_ns = record.task.estimate.run_ns
        ran_ns: int = record.ran_ns
        if record.state.executing:
            ran_ns += now_ns - record.started_ns
        # One that has passed its estimate may end at any moment; to give it a share of it more
        # would make runs late that end in time (seen in simulation).
        left_ns = run_ns - ran_ns
        return Nanos(left_ns if left_ns > 0 else 1)

    def rank(self, record: Record, now_ns: Nanos) -> tuple[int, Key]:
        """How urgent the record is beside others, smaller first.

        The policy says so, except that one promoted for waiting too long goes first and one
        that is answered already goes last.
        """
        standing = 0 if record.promoted else 2 if record.state.answered else 1
        return standing, self._rank_task(record.task, self.left_ns(record, now_ns), now_ns)

    def suspended_ns(self, record: Record, now_ns: Nanos) -> Nanos:
        """How long the record, on a lane, has stood suspended since its launch."""
        if record.state.executing:
            return record.suspended_ns
        return Nanos(record.suspended_ns + now_ns - record.stopped_ns)

    def occupy(self, record: Record, now_ns: Nanos) -> LaneId:
        """Give the record an idle lane, its memory, and a slot to execute in."""
        lane_id = min(self.idle)
        self.ledger.reserve(record.task.task_id, record.task.reserve_bytes)
        self.idle.remove(lane_id)
        self.busy[lane_id] = record
        record.lane_id = lane_id
        record.co_runners = 0
        record.ran_ns = record.suspended_ns = Nanos(0)
        record.started_ns = now_ns
        self._execute(record)
        return lane_id

    def suspend(self, record: Record, now_ns: Nanos) -> None:
        """The record gives up its slot, not its lane and memory."""
        self.executing_count -= 1
        record.ran_ns = Nanos(record.ran_ns + now_ns - record.started_ns)
        record.stopped_ns = now_ns

    def resume(self, record: Record, now_ns: Nanos) -> None:
        """The record has a slot again."""
        record.suspended_ns = Nanos(record.suspended_ns + now_ns - record.stopped_ns)
        record.started_ns = now_ns
        self._execute(record)

    def vacate(self, record: Record, was_executing: bool) -> None:
        """Take lane and memory back from the record, and its slot if it was executing."""
        lane_id = record.lane_id
        if lane_id is None or self.busy.pop(lane_id, None) is not record:
            raise InvariantViolation(f"task {record.task.task_id} is not on lane {lane_id}")
        self.ledger.give_back(record.task.task_id)
        self.executing_count -= was_executing
        self.idle.add(lane_id)
        record.lane_id = None

    def note(self, now_ns: Nanos) -> None:
        """Remember what is free from now on."""
        slots, available_bytes = self.free_slots, self.ledger.available_bytes
        history = self._history
        if not history or history[-1][1] != slots or history[-1][2] != available_bytes:
            history.append((now_ns, slots, available_bytes))

    def free_since(self, need_bytes: int, after_ns: Nanos, now_ns: Nanos) -> Nanos:
        """Since when, not before `after_ns`, a lane and `need_bytes` have been free all along."""
        since_ns = now_ns
        for start_ns, slots, available_bytes in reversed(self._history):
            if slots < 1 or available_bytes < need_bytes:
                break
            since_ns = start_ns
            if start_ns <= after_ns:
                return after_ns
        return since_ns

    def _execute(self, record: Record) -> None:
        """Count the record among those that execute, and all of them as each other's company."""
        beside = self.executing_count
        self.executing_count = beside + 1
        if beside:
            for other in self.busy.values():
                if other.co_runners < beside and other.state.executing:
                    other.co_runners = beside
        if record.co_runners < beside:
            record.co_runners = beside
