"""What is decided on: the plan, the lanes and the memory at one moment.

Disciplines read a ``Board`` and propose one move at a time; only the scheduler changes it.
"""

from collections import deque

from serve.core.ledger import Ledger
from serve.core.params import DeviceFacts
from serve.core.plan import Plan, Record
from serve.core.types import LaneId, Nanos
from serve.errors import InvariantViolation


class Board:
    """Plan, lanes and memory."""

    __slots__ = ("_history", "_max_slots", "busy", "idle", "ledger", "plan")

    def __init__(self, device: DeviceFacts, plan: Plan) -> None:
        self.plan = plan
        self.ledger = Ledger(device.budget_bytes)
        #: Lanes that are up and hold nothing.
        self.idle: set[LaneId] = set()
        #: What each busy lane holds.
        self.busy: dict[LaneId, Record] = {}
        self._max_slots = device.slots
        #: Since when each (free slots, free memory) held. Long enough to look back over one
        #: prepare; older entries are lost, and a wait that began before them is cut short.
        self._history: deque[tuple[Nanos, int, int]] = deque(maxlen=64)

    @property
    def slots(self) -> int:
        """Tasks that may execute at once on the lanes that are up; at least 1, to plan for."""
        return max(1, min(self._max_slots, len(self.idle) + len(self.busy)))

    @property
    def free_slots(self) -> int:
        """Tasks that could start now if memory allows."""
        return min(len(self.idle), self._max_slots - len(self.busy))

    @property
    def available_bytes(self) -> int:
        """Memory not reserved; negative after the budget was lowered below its use."""
        return self.ledger.available_bytes

    def occupy(self, record: Record) -> LaneId:
        """Give the record an idle lane and its memory."""
        lane_id = min(self.idle)
        self.ledger.reserve(record.task.task_id, record.task.reserve_bytes)
        self.idle.remove(lane_id)
        record.lane_id = lane_id
        record.co_runners = running = len(self.busy)
        for other in self.busy.values():
            if other.co_runners < running:
                other.co_runners = running
        self.busy[lane_id] = record
        return lane_id

    def vacate(self, record: Record) -> None:
        """Take lane and memory back from the record."""
        lane_id = record.lane_id
        if lane_id is None or self.busy.pop(lane_id, None) is not record:
            raise InvariantViolation(f"task {record.task.task_id} is not on lane {lane_id}")
        self.ledger.give_back(record.task.task_id)
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
