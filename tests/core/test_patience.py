"""Nobody waits for ever, and who is late waits seconds."""

import pytest

from tests.builders import MS, params, task
from tests.core.world import World


def start(**choices):
    """Return a world with its lanes up."""
    world = World(params(**choices))
    for lane_id in world.params.device.lane_ids:
        world.lane_ready(lane_id)
    return world


def executing(world):
    return [task for lane, task in world.on_lane.items() if lane not in world.stopped]


@pytest.mark.parametrize("window", ["adaptive", "fixed"])
@pytest.mark.parametrize("discipline", ["rolling", "barrier", "preemptive"])
def test_nobody_starves(discipline, window):
    """One long task under an endless stream of short ones, which every rule prefers."""
    world = start(
        policy="slack", discipline=discipline, lanes=2, parallelism=1, can_suspend=True,
        patience=5, prepare_ahead=2, window=window, window_ns=2 * MS,
    )  # fmt: skip
    world.arrive(task(0, run_ns=2 * MS))
    world.advance(2 * MS)
    world.prepare(0)
    world.arrive(task(1, run_ns=900 * MS, target_ns=1, arrived_ns=world.now))
    for task_id in range(2, 30):
        world.arrive(task(task_id, run_ns=2 * MS, arrived_ns=world.now))
        while world.preparing:
            world.prepare(min(world.preparing))
        world.advance(2 * MS)
        if 1 in executing(world):
            break
        world.end(min(world.on_lane.keys() - world.stopped))
    assert 1 in executing(world)
    # Once it runs nothing stops it again.
    world.arrive(task(99, run_ns=MS, arrived_ns=world.now))
    while world.preparing:
        world.prepare(min(world.preparing))
    assert 1 in executing(world)
    world.finish_everything()


@pytest.mark.parametrize("window", ["adaptive", "fixed"])
def test_who_is_never_to_join_others_joins_them_in_the_end(window):
    """A late task that came back from a lost lane, where runs slow one another and one always is.

    Nothing may join that would be late, so it would wait for a moment without any run.
    """
    world = start(
        policy="slack", lanes=2, patience=5, slowdown=(1.0, 1.9), window=window, window_ns=MS,
    )  # fmt: skip

    def pass_a_while(*, but=()):
        world.advance(MS)
        while found := world.preparing.difference(but):
            world.prepare(min(found))

    world.arrive(task(0, run_ns=900 * MS, target_ns=1))
    pass_a_while()
    world.lane_lost(0)
    world.lane_ready(0)
    for task_id in range(1, 40):
        world.arrive(task(task_id, run_ns=2 * MS, target_ns=40 * MS, arrived_ns=world.now))
        pass_a_while(but=(0,) if task_id < 4 else ())
        shorts = [lane for lane, one in world.on_lane.items() if one]
        assert shorts
        if len(shorts) > 1:
            world.end(min(shorts, key=world.on_lane.__getitem__))
    assert world.launches[0] == 2
    world.finish_everything()


def test_many_that_are_late_wait_a_bounded_time():
    """Twenty late tasks under a stream of others: after three seconds they come in quick turn."""
    world = start(policy="slack", discipline="rolling", lanes=1, prepare_ahead=2)
    late = range(1, 21)
    world.arrive(task(0, run_ns=10 * MS))
    world.prepare(0)
    for task_id in late:
        world.arrive(task(task_id, run_ns=50 * MS, target_ns=1))
    waiting, next_id = set(late), 100
    while world.now < 6_000 * MS:
        world.arrive(task(next_id, run_ns=10 * MS, arrived_ns=world.now))
        next_id += 1
        while world.preparing:
            world.prepare(min(world.preparing))
        world.advance(10 * MS)
        waiting -= set(world.on_lane.values())
        world.end(next(iter(world.on_lane)))
    assert not waiting
    world.finish_everything()


def test_who_is_late_has_waited_long_before_few_are_enough():
    """A sixteenth of the launches counts from three seconds on, not for whoever is late."""
    world = start(policy="slack", discipline="rolling", lanes=1, prepare_ahead=2, patience=32)
    world.arrive(task(0, run_ns=10 * MS))
    world.prepare(0)
    world.arrive(task(1, run_ns=50 * MS, target_ns=1))
    for task_id in range(2, 22):
        world.arrive(task(task_id, run_ns=10 * MS, arrived_ns=world.now))
        while world.preparing:
            world.prepare(min(world.preparing))
        world.advance(10 * MS)
        world.end(0)
    assert 1 not in world.launches
    world.finish_everything()
