"""Limits that change while tasks wait and run."""

import pytest

from serve.core.events import LimitsChanged
from serve.core.types import RejectReason
from tests.builders import MS, params, task
from tests.core.world import World


def test_limits_change_for_those_that_come_next():
    world = World(params(lanes=1, max_queue=2))
    world.lane_ready(world.params.device.lane_ids[0])
    for number in range(2):
        world.arrive(task(number, run_ns=10 * MS))
    world.tell(LimitsChanged(max_queue=3, shed_late=False, run_limit_ns=None))
    world.arrive(task(2))
    assert not world.answers
    world.tell(LimitsChanged(max_queue=1, shed_late=False, run_limit_ns=None))
    answer, _ = world.arrive(task(3))
    assert answer.outcome.reason is RejectReason.QUEUE_FULL
    assert "3 requests are waiting or running, at most 1" in answer.outcome.message
    world.finish_everything()


@pytest.mark.parametrize("name", ["max_queue", "run_limit_ns"])
def test_impossible_limits_are_refused(name):
    with pytest.raises(ValueError, match=name):
        LimitsChanged(**({"max_queue": 1, "shed_late": False, "run_limit_ns": None} | {name: 0}))
