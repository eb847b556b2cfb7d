"""The backlog: pending tasks in the policy's order, however many there are.

A batch holds the tasks of one window; with a window that replans there is only one, which all
join at once. Planning takes a bounded number from it: the horizon.
"""

from collections import OrderedDict, deque

from serve.core.policies import Policy
from serve.core.state.ordered import SortedKeys
from serve.core.state.record import Record
from serve.core.types import Nanos, TaskId


class Batch:
    """Tasks that are planned together."""

    __slots__ = ("_keys", "records")

    def __init__(self) -> None:
        #: In order of admission.
        self.records: OrderedDict[TaskId, Record] = OrderedDict()
        #: Sorted once there are more than are planned at a time, until the batch is empty.
        self._keys: SortedKeys | None = None

    def add(self, record: Record) -> None:
        """Add the record."""
        self.records[record.task.task_id] = record
        if self._keys is not None:
            self._keys.add(record.key)

    def remove(self, record: Record) -> None:
        """Remove the record, which is in."""
        del self.records[record.task.task_id]
        if self._keys is not None:
            self._keys.remove(record.key)
            if not self.records:
                self._keys = None

    def horizon(self, policy: Policy, limit: int, now_ns: Nanos) -> list[Record]:
        """Return all tasks, or the policy's `limit`, always with the longest waiting among them."""
        records = self.records
        if len(records) <= limit:
            return list(records.values())
        if self._keys is None:
            self._keys = SortedKeys()
            for record in records.values():
                self._keys.add(record.key)
        picked = policy.horizon(self._keys, limit, now_ns)
        chosen = [records[TaskId(key[-1])] for key in picked]
        oldest = next(iter(records.values()))
        if oldest not in chosen:
            chosen[-1] = oldest
        return chosen


class Backlog:
    """Pending tasks that have no fixed place in the plan."""

    __slots__ = ("_batches", "_homes", "_policy", "_sealing", "plannable_count")

    def __init__(self, policy: Policy, sealing: bool) -> None:
        self._policy = policy
        #: Whether tasks become plannable only when their batch is sealed.
        self._sealing = sealing
        #: Sealed ones in order, then the one that arrivals join.
        self._batches: deque[Batch] = deque([Batch()])
        self._homes: dict[TaskId, Batch] = {}
        #: Tasks that may be planned now.
        self.plannable_count = 0

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, task_id: TaskId) -> bool:
        return task_id in self._homes

    def add(self, record: Record) -> None:
        """Add the record to the open batch."""
        batch = self._batches[-1]
        batch.add(record)
        self._homes[record.task.task_id] = batch
        if not self._sealing:
            self.plannable_count += 1

    def discard(self, record: Record) -> None:
        """Take the record out if it is in."""
        batch = self._homes.pop(record.task.task_id, None)
        if batch is None:
            return
        batch.remove(record)
        if not self._sealing:
            self.plannable_count -= 1
        elif batch is not self._batches[-1]:
            self.plannable_count -= 1
            if not batch.records:
                self._batches.remove(batch)

    def seal(self) -> None:
        """Close the open batch; later arrivals join the next."""
        opened = self._batches[-1]
        if self._sealing and opened.records:
            self.plannable_count += len(opened.records)
            self._batches.append(Batch())

    def oldest(self) -> Record | None:
        """Return the record admitted first; None when there is none."""
        return next(iter(self._batches[0].records.values()), None)

    def horizon(self, limit: int, now_ns: Nanos) -> list[Record]:
        """Return up to `limit` tasks of the first batch that may be planned."""
        if self.plannable_count == 0:
            return []
        return self._batches[0].horizon(self._policy, limit, now_ns)
