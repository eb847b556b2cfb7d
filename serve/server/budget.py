"""The memory budget of tasks: what weights, graphs and lanes leave of each device."""

from collections.abc import Callable

from serve.core.events import BudgetChanged
from serve.core.types import Bytes, DeviceId, LaneId


class TaskBudget:
    """Tells the scheduler each device's memory for tasks whenever something else takes or frees it.

    All devices hold the same weights and graphs.
    """

    def __init__(
        self,
        device_bytes: int,
        lane_ids_by_device: tuple[tuple[LaneId, ...], ...],
        *,
        weights_bytes: Callable[[], int],
        graphs_bytes: Callable[[], int],
        tell: Callable[[BudgetChanged], None],
    ) -> None:
        """`device_bytes` is the memory of each device; the two callables say what is taken now."""
        self._device_bytes = device_bytes
        self._lane_ids_by_device = lane_ids_by_device
        self._weights_bytes = weights_bytes
        self._graphs_bytes = graphs_bytes
        self._tell = tell
        #: Bytes of its device that a lane holds beside what was planned.
        self._unplanned_bytes: dict[LaneId, int] = {}

    def update(self) -> None:
        """Tell the budgets as they are now. Any thread, without the driver's lock."""
        self.weights_changed(self._weights_bytes())

    def weights_changed(self, weights_bytes: int) -> None:
        """Tell the budgets as they are with that much for weights."""
        left_bytes = self._device_bytes - weights_bytes - self._graphs_bytes()
        for number, lane_ids in enumerate(self._lane_ids_by_device):
            # Each lane tells of the whole device: the most that any knows of.
            unplanned_bytes = max(self._unplanned_bytes.get(lane_id, 0) for lane_id in lane_ids)
            budget_bytes = Bytes(max(0, left_bytes - unplanned_bytes))
            self._tell(BudgetChanged(budget_bytes, DeviceId(number)))

    def memory_taken(self, lane_id: LaneId, unplanned_bytes: int) -> None:
        """Take note of what a lane holds of its device beside what was planned."""
        self._unplanned_bytes[lane_id] = unplanned_bytes
        self.update()
