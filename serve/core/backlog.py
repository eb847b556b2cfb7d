"""The backlog: pending tasks in the policy's order, however many there are.

A batch holds the tasks of one window; with a window that replans there is only one, which all
join at once. Planning takes a bounded number from it: the horizon.
"""

from collections import OrderedDict, deque

from serve.core.ordered import SortedKeys
from serve.core.policies import Policy
from serve.core.record import Record
from serve.core.types import Nanos, TaskId


class Batch:
    """Tasks that are planned together."""

    __slots__ = ("keys", "records")

    def __init__(self) -> None:
        self.keys = SortedKeys()
        #: In order of admission.
        self.records: OrderedDict[TaskId, Record] = OrderedDict()

    def horizon(self, policy: Policy, limit: int, now_ns: Nanos) -> list[Record]:
        """All tasks, or the `limit` the policy picks, the longest waiting always among them."""
        records = self.records
        if len(records) <= limit:
            return list(records.values())
        picked = policy.horizon(self.keys, limit, now_ns)
        chosen = [records[TaskId(key[-1])] for key in picked]
        oldest = next(iter(records.values()))
        if oldest not in chosen:
            chosen[-1] = oldest
        return chosen


class Backlog:
    """Every pending task that has no fixed place in the plan."""

    __slots__ = ("_batches", "_homes", "_policy", "_sealing", "sealed_count")

    def __init__(self, policy: Policy, sealing: bool) -> None:
        self._policy = policy
        #: Whether tasks become plannable only when their batch is sealed.
        self._sealing = sealing
        #: Sealed ones in order, then the one that arrivals join.
        self._batches: deque[Batch] = deque([Batch()])
        self._homes: dict[TaskId, Batch] = {}
        #: Tasks in sealed batches.
        self.sealed_count = 0

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, task_id: TaskId) -> bool:
        return task_id in self._homes

    @property
    def plannable_count(self) -> int:
        """Tasks that may be planned now."""
        return self.sealed_count if self._sealing else len(self._homes)

    def add(self, record: Record) -> None:
        """The record joins the open batch."""
        task_id = record.task.task_id
        batch = self._batches[-1]
        batch.keys.add(record.key)
        batch.records[task_id] = record
        self._homes[task_id] = batch

    def discard(self, record: Record) -> None:
        """Take the record out if it is in."""
        task_id = record.task.task_id
        batch = self._homes.pop(task_id, None)
        if batch is None:
            return
        batch.keys.remove(record.key)
        del batch.records[task_id]
        if batch is not self._batches[-1]:
            self.sealed_count -= 1
            if not batch.records:
                self._batches.remove(batch)

    def seal(self) -> None:
        """The open batch is complete; what arrives from now on joins the next."""
        opened = self._batches[-1]
        if self._sealing and opened.records:
            self.sealed_count += len(opened.records)
            self._batches.append(Batch())

    def oldest(self) -> Record | None:
        """The one admitted first."""
        return next(iter(self._batches[0].records.values()), None)

    def horizon(self, limit: int, now_ns: Nanos) -> list[Record]:
        """What to plan next: up to `limit` tasks of the first batch that may be planned."""
        if self.plannable_count == 0:
            return []
        return self._batches[0].horizon(self._policy, limit, now_ns)
