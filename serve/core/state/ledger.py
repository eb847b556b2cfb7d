"""The memory ledger: what tasks on lanes have reserved never exceeds the budget."""

from serve.core.types import Bytes, InputBlock, Task, TaskId
from serve.errors import InvariantViolation


class Ledger:
    """Reservations by task against one budget; a block of inputs counts once, whoever holds it."""

    __slots__ = ("_blocks", "_held", "available_bytes", "budget_bytes", "reserved_bytes")

    def __init__(self, budget_bytes: Bytes) -> None:
        #: Σ reserved may not pass this; see ``set_budget``.
        self.budget_bytes = budget_bytes
        #: Σ of all reservations.
        self.reserved_bytes = Bytes(0)
        #: What may still be reserved; negative after the budget was lowered below its use.
        self.available_bytes: int = budget_bytes
        #: What each holds beside its block, and the block.
        self._held: dict[TaskId, tuple[int, InputBlock | None]] = {}
        #: Number of holders, by block.
        self._blocks: dict[TaskId, int] = {}

    def set_budget(self, budget_bytes: Bytes) -> None:
        """Σ reserved may not pass this from now on.

        Lowered below what is reserved already it takes effect as tasks give theirs back; until then
        nothing new is reserved.
        """
        self.budget_bytes = budget_bytes
        self.available_bytes = budget_bytes - self.reserved_bytes

    def need_bytes(self, task: Task) -> int:
        """Return what a reservation for the task would take now."""
        block = task.block
        if block is None or block.block_id not in self._blocks:
            return task.estimate.reserve_bytes
        return task.estimate.reserve_bytes - block.size_bytes

    def reserve(self, task_id: TaskId, size_bytes: Bytes, block: InputBlock | None = None) -> None:
        """Hold `size_bytes`, of which `block` is a part, for the task.

        Raises InvariantViolation when it does not fit.
        """
        if task_id in self._held:
            raise InvariantViolation(f"task {task_id} holds memory already")
        own_bytes: int = size_bytes
        take_bytes: int = size_bytes
        if block is not None:
            own_bytes -= block.size_bytes
            if block.block_id in self._blocks:
                take_bytes = own_bytes
        if take_bytes > self.available_bytes:
            raise InvariantViolation(
                f"task {task_id} needs {take_bytes} bytes, {self.available_bytes} are left"
            )
        self._held[task_id] = own_bytes, block
        if block is not None:
            self._blocks[block.block_id] = self._blocks.get(block.block_id, 0) + 1
        self._take(take_bytes)

    def give_back(self, task_id: TaskId) -> None:
        """End the task's reservation; raises InvariantViolation when it has none."""
        if task_id not in self._held:
            raise InvariantViolation(f"task {task_id} holds no memory")
        own_bytes, block = self._held.pop(task_id)
        if block is not None:
            self._blocks[block.block_id] -= 1
            if not self._blocks[block.block_id]:
                del self._blocks[block.block_id]
                own_bytes += block.size_bytes
        self._take(-own_bytes)

    def shrink(self, task_id: TaskId, size_bytes: Bytes) -> None:
        """Have the task, which shares no block, hold no more than `size_bytes` from now on.

        Raises InvariantViolation when it holds less, or none.
        """
        held_bytes, block = self._held.get(task_id, (-1, None))
        if block is not None or size_bytes > held_bytes:
            raise InvariantViolation(f"task {task_id} holds no {size_bytes} bytes by itself")
        self._held[task_id] = size_bytes, None
        self._take(size_bytes - held_bytes)

    def _take(self, size_bytes: int) -> None:
        self.reserved_bytes = Bytes(self.reserved_bytes + size_bytes)
        self.available_bytes -= size_bytes

    def holders(self) -> frozenset[TaskId]:
        """The tasks that hold memory now."""
        return frozenset(self._held)
