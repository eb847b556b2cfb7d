"""Long runs stay off a device's reserved part while short ones are in sight."""

from dataclasses import replace

import pytest

from serve.core.commands import LaunchTask
from serve.core.rules.reserved import LONG_FACTOR, PERIOD_NS, ReservedPart
from serve.core.types import Nanos
from tests.builders import params, task
from tests.core.world import World, ready

MS = 1_000_000
START = Nanos(50 * PERIOD_NS)


def after(periods):
    return Nanos(START + int(periods * PERIOD_NS))


def test_a_run_is_long_beside_a_short_one_only():
    part = ReservedPart(is_there=True)
    long = Nanos(LONG_FACTOR * MS)
    assert not part.keeps_off(long, START)
    assert not part.keeps_off(Nanos(MS), START)
    assert part.keeps_off(long, START)
    assert not part.keeps_off(Nanos(long - 1), START)
    assert not part.keeps_off(Nanos(MS), START)


@pytest.mark.parametrize(("later", "seen"), [(0.9, True), (1.1, True), (2.1, False), (9, False)])
def test_a_short_run_is_in_sight_for_a_while(later, seen):
    part = ReservedPart(is_there=True)
    long = Nanos(LONG_FACTOR * MS)
    part.keeps_off(Nanos(MS), START)
    assert part.keeps_off(long, after(later)) == seen


def test_where_long_runs_go_on_a_short_one_is_forgotten():
    part = ReservedPart(is_there=True)
    long = Nanos(LONG_FACTOR * MS)
    part.keeps_off(Nanos(MS), START)
    found = [part.keeps_off(long, after(tenths / 10)) for tenths in range(1, 40)]
    assert found == sorted(found, reverse=True)
    assert 10 <= sum(found) <= 20


def test_a_device_without_one_keeps_nothing_off():
    part = ReservedPart(is_there=False)
    part.keeps_off(Nanos(1), START)
    assert not part.keeps_off(Nanos(1 << 40), START)


class Told(World):
    """It keeps all commands."""

    def __init__(self, params):
        super().__init__(params)
        self.commands = []

    def tell(self, event):
        found = super().tell(event)
        self.commands += found
        return found


@pytest.mark.parametrize("has_part", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_the_scheduler_says_so_with_the_launch(has_part, at_once):
    """Whether a task is launched when it comes or after others that it waited for."""
    facts = params(lanes=2)
    world = Told(replace(facts, device=replace(facts.device, has_reserved_part=has_part)))
    for lane_id in facts.device.lane_ids:
        world.lane_ready(lane_id)
    short, long = task(0, run_ns=MS), task(1, run_ns=100 * MS)
    if at_once:
        for one in (short, long):
            world.arrive(one, prepared_since_ns=world.now)
    else:
        ready(world, short, task(2, run_ns=MS), long)
    world.finish_everything()
    bounded = {c.task_id: c.bounded for c in world.commands if isinstance(c, LaunchTask)}
    assert bounded[short.task_id] is False
    assert bounded[long.task_id] is has_part
