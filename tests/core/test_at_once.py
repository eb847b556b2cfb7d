"""Tasks launched as they arrive, past planning and discipline: nothing else may come of it."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.core.commands import LaunchTask
from serve.core.disciplines import DISCIPLINES
from serve.core.events import (
    DrainStarted,
    SlowdownChanged,
    TaskCancelled,
    TaskFailed,
)
from serve.core.fleet.fleet import make_scheduler
from serve.core.launcher import Launcher
from serve.core.policies import POLICIES
from serve.core.types import FailReason
from tests.builders import MS, US, params, task, unions_saving
from tests.core.plain_state import state_of
from tests.core.world import World


class Twins(World):
    """A world with a second scheduler, which never launches at once and must do the same."""

    def __init__(self, chosen):
        super().__init__(chosen)
        self.other = make_scheduler(chosen)
        for device in self.other.devices:
            device._launcher._replans = False
        self.seen = Counter()

    def tell(self, event):
        """Deliver the event to both and compare what they say and what they have become."""
        commands = super().tell(event)
        assert self.other.handle(event, self.now) == commands
        assert self.other.next_wakeup() == self.scheduler.next_wakeup()
        for one, two in zip(self.scheduler.devices, self.other.devices, strict=True):
            assert state_of(one.parts) == state_of(two.parts)
            assert one._launcher.held_until_ns == two._launcher.held_until_ns
        self.seen.update(type(command).__name__ for command in commands)
        return commands


def happen(world, rng):
    """Let one thing happen that can."""
    ends = sorted(world.on_lane.keys() - world.stopped)
    what = rng.choices(
        ["arrive", "end", "pass", "prepare", "fail", "cancel", "lose", "up", "budget", "odd"],
        [10, 8, 6, 3, 1, 1, 0.5, 1, 0.5, 0.5],
    )[0]
    if what == "arrive":
        arriving = task(
            len(world.tasks),
            reserve=rng.randrange(22),
            run_ns=rng.choice([100 * US, MS, 8 * MS]),
            timeout_ns=rng.choice([None, None, 1, 3 * MS, 20 * MS]),
            priority=rng.choice([0, 0, 1, 3]),
            model=rng.choice(["gcn:1", "gat:1"]),
            arrived_ns=world.now,
            tenant=rng.choice(["", "", "other"]),
        )
        world.arrive(arriving, rng.choice([None, world.now, max(0, world.now - MS)]))
    elif what == "end" and ends:
        world.end(rng.choice(ends))
    elif what == "fail" and ends:
        lane = rng.choice(ends)
        failed = TaskFailed(world.on_lane[lane], lane, FailReason.MODEL_ERROR, "raised")
        world.end(lane, failed)
    elif what == "prepare" and world.preparing:
        world.prepare(rng.choice(sorted(world.preparing)))
    elif what == "cancel" and world.tasks:
        world.tell(TaskCancelled(rng.choice(sorted(world.tasks))))
    elif what == "lose" and world.lanes_up:
        world.lane_lost(rng.choice(sorted(world.lanes_up)))
    elif what == "up" and world.lanes_up != world.device_of.keys():
        world.lane_ready(min(world.device_of.keys() - world.lanes_up))
    elif what == "budget":
        world.change_budget(rng.randrange(25), rng.randrange(len(world.budgets)))
    elif what == "odd":
        odd = rng.randrange(4)
        if odd == 0:
            world.tell(SlowdownChanged(rng.choice([(1.0,), (1.0, 1.6, 2.2)])))
        elif odd == 1 and world.lanes_up:
            world.measure(rng.choice(sorted(world.lanes_up)), rng.randrange(30))
        elif odd == 2 and len(world.tasks) > 20:
            world.tell(DrainStarted())
        else:
            world.advance(3_000 * MS)  # runs are looked at
    else:
        world.advance(rng.choice([0, 10 * US, 500 * US, 5 * MS]))


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_a_launch_at_once_is_the_launch_that_planning_would_come_to(seed):
    rng = random.Random(seed)
    world = Twins(
        params(
            policy=rng.choice(sorted(POLICIES)),
            discipline=rng.choice(sorted(DISCIPLINES)),
            window=rng.choice(["adaptive", "adaptive", "fixed"]),
            window_ns=2 * MS,
            budget=20,
            lanes=3,
            parallelism=rng.choice([1, 2, 3]),
            can_suspend=rng.random() < 0.5,
            slowdown=rng.choice([(1.0,), (1.0, 1.3)]),
            devices=rng.choice([1, 1, 2]),
            lane_limit=rng.choice([None, 10]),
            lane_requests=rng.choice([None, None, 1, 4]),
            max_queue=rng.choice([2, 12]),
            prepare_ahead=rng.choice([None, 0, 1]),
            patience=3,
            shed_late=rng.random() < 0.3,
            unions=rng.choice([None, unions_saving(90 * US)]),
            watched=rng.random() < 0.5,
        )
    )
    for lane_id in world.device_of:
        world.lane_ready(lane_id)
    for _ in range(60):
        happen(world, rng)
    world.finish_everything()


@pytest.mark.parametrize("executing", [0, 1, 2])
def test_it_takes_the_short_way_when_nothing_waits(executing, monkeypatch):
    """Up to the number of slots; the next one waits and takes the long way."""
    taken = []
    launch_at_once = Launcher.launch_at_once

    def noted(launcher, record):
        taken.append(launch_at_once(launcher, record))
        return taken[-1]

    monkeypatch.setattr(Launcher, "launch_at_once", noted)
    world = Twins(params(lanes=3, parallelism=2, policy="slack", discipline="preemptive"))
    world.other.devices[0]._launcher._replans = True
    for lane_id in world.device_of:
        world.lane_ready(lane_id)
    world.advance(MS)
    for number in range(executing + 1):
        commands = world.arrive(task(number, arrived_ns=world.now), world.now)
    assert [type(command) for command in commands] == [LaunchTask] * (executing < 2)
    assert taken == [n < 2 for n in range(executing + 1) for _ in "ab"]
    world.finish_everything()


@pytest.mark.parametrize(("waited_ns", "launched"), [(MS - 1, 1), (MS, 0), (5 * MS, 0)])
def test_a_task_whose_time_is_over_when_it_arrives_is_not_launched(waited_ns, launched):
    world = Twins(params(policy="slack", discipline="preemptive", lanes=2))
    for lane in sorted(world.device_of):
        world.lane_ready(lane)
    arrived_ns = world.now
    world.advance(waited_ns)
    world.arrive(task(0, timeout_ns=MS, arrived_ns=arrived_ns), world.now)
    assert world.seen["LaunchTask"] == launched
    world.finish_everything()
