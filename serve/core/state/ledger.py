"""The memory ledger: what tasks on lanes have reserved never exceeds the budget."""

from serve.core.types import Bytes, TaskId
from serve.errors import InvariantViolation


class Ledger:
    """Reservations by task against one budget."""

    __slots__ = ("_held", "available_bytes", "budget_bytes", "reserved_bytes")

    def __init__(self, budget_bytes: Bytes) -> None:
        #: Σ reserved may not pass this; see ``set_budget``.
        self.budget_bytes = budget_bytes
        #: Σ of all reservations.
        self.reserved_bytes = Bytes(0)
        #: What may still be reserved; negative after the budget was lowered below its use.
        self.available_bytes: int = budget_bytes
        self._held: dict[TaskId, Bytes] = {}

    def set_budget(self, budget_bytes: Bytes) -> None:
        """Σ reserved may not pass this from now on.

        Lowered below what is reserved already it takes effect as tasks give theirs back; until then
        nothing new is reserved.
        """
        self.budget_bytes = budget_bytes
        self.available_bytes = budget_bytes - self.reserved_bytes

    def reserve(self, task_id: TaskId, size_bytes: Bytes) -> None:
        """Hold `size_bytes` for the task; raises InvariantViolation when it does not fit."""
        if task_id in self._held:
            raise InvariantViolation(f"task {task_id} holds memory already")
        if size_bytes > self.available_bytes:
            raise InvariantViolation(
                f"task {task_id} needs {size_bytes} bytes, {self.available_bytes} are left"
            )
        self._held[task_id] = size_bytes
        self.reserved_bytes = Bytes(self.reserved_bytes + size_bytes)
        self.available_bytes -= size_bytes

    def give_back(self, task_id: TaskId) -> None:
        """End the task's reservation; raises InvariantViolation when it has none."""
        size_bytes = self._held.pop(task_id, None)
        if size_bytes is None:
            raise InvariantViolation(f"task {task_id} holds no memory")
        self.reserved_bytes = Bytes(self.reserved_bytes - size_bytes)
        self.available_bytes += size_bytes

    def holders(self) -> frozenset[TaskId]:
        """The tasks that hold memory now."""
        return frozenset(self._held)
