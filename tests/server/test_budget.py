"""The memory that weights, graphs and lanes leave for tasks."""

from serve.core.events import BudgetChanged
from serve.core.types import LaneId
from serve.server.budget import TaskBudget

LANES = ((LaneId(0), LaneId(1)), (LaneId(2), LaneId(3)))


def test_each_device_is_told_what_is_left_of_it():
    told = []
    taken = {"weights": 10, "graphs": 20}
    budget = TaskBudget(
        100,
        LANES,
        weights_bytes=lambda: taken["weights"],
        graphs_bytes=lambda: taken["graphs"],
        tell=told.append,
    )
    budget.update()
    assert told == [BudgetChanged(70, 0), BudgetChanged(70, 1)]
    told.clear()
    # Lanes of one device tell of the same memory: it counts once.
    budget.memory_taken(LaneId(2), 5)
    told.clear()
    budget.memory_taken(LaneId(3), 7)
    assert told == [BudgetChanged(70, 0), BudgetChanged(63, 1)]
    told.clear()
    budget.weights_changed(200)
    assert told == [BudgetChanged(0, 0), BudgetChanged(0, 1)]
