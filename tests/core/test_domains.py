"""Trust domains: their tasks run on lanes of their own, and neither takes the other's."""

from dataclasses import replace

import pytest

from serve.core.commands import LaunchTask
from serve.core.events import TaskArrived
from serve.core.params import SchedulerParams
from serve.core.types import LaneId
from tests.builders import MS, device, params, task
from tests.core.world import World

SHARED, OWN = LaneId(0), LaneId(1)


def world(discipline: str = "rolling", **others) -> World:
    """Two lanes, one slot unless told; lane 1 is that of the domain `own`."""
    found = params(discipline=discipline, policy="fifo", **others)
    found = replace(found, device=replace(found.device, own_lanes=(("own", (OWN,)),)))
    made = World(found)
    for lane_id in (SHARED, OWN):
        made.lane_ready(lane_id)
    return made


def launched(commands) -> list[tuple[int, LaneId]]:
    return [(one.task_id, one.lane_id) for one in commands if isinstance(one, LaunchTask)]


def ready(made: World, task_id: int, domain: str = "", **others):
    """A task that arrives prepared."""
    arriving = task(task_id, domain=domain, arrived_ns=made.now, model=f"m{domain}:1", **others)
    return made.arrive(arriving, prepared_since_ns=made.now)


@pytest.mark.parametrize("discipline", ["rolling", "preemptive", "barrier"])
def test_a_task_runs_on_a_lane_of_its_domain(discipline):
    made = world(discipline)
    assert launched(ready(made, 0, "own")) == [(0, OWN)]
    made.end(OWN)
    made.advance(20 * MS)
    assert launched(ready(made, 1)) == [(1, SHARED)]


@pytest.mark.parametrize("discipline", ["rolling", "preemptive"])
def test_who_waits_for_a_lane_of_its_domain_holds_up_nobody(discipline):
    # Two shared lanes and a slot for each, of which one is free, and the only own lane is taken.
    made = world(discipline, lanes=3, parallelism=2)
    made.lane_ready(LaneId(2))
    assert launched(ready(made, 0, "own", run_ns=50 * MS)) == [(0, OWN)]
    assert launched(ready(made, 1, "own")) == []
    assert launched(ready(made, 2)) == [(2, SHARED)]
    # And gets it when it comes free.
    assert (1, OWN) in launched(made.end(OWN))


def test_a_domain_without_a_lane_that_is_up_waits_for_it():
    made = world(parallelism=1)
    made.lane_lost(OWN)
    assert launched(ready(made, 0, "own")) == []
    assert launched(ready(made, 1)) == [(1, SHARED)]
    made.end(SHARED)
    assert launched(made.lane_ready(OWN)) == [(0, OWN)]


def test_lanes_of_a_domain_are_no_slots_more():
    facts = replace(device(lanes=5), own_lanes=(("own", (LaneId(3), LaneId(4))),))
    assert facts.slots == 3


def test_memory_is_one_ledger():
    made = world(budget=100, lanes=3, parallelism=2)
    made.lane_ready(LaneId(2))
    assert launched(ready(made, 0, "own", reserve=80)) == [(0, OWN)]
    assert launched(ready(made, 1, reserve=40)) == []
    assert made.scheduler.reserved_bytes == 80
    assert launched(made.end(OWN)) == [(1, SHARED)]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ((("a", (LaneId(7),)),), "some of the lanes"),
        ((("a", (SHARED,)), ("b", (SHARED,))), "each of one domain"),
        ((("a", (SHARED, OWN)),), "some of the lanes"),
        ((("", (OWN,)),), "have names"),
        ((("a", ()), ("a", (OWN,))), "no two the same"),
    ],
)
def test_lanes_that_cannot_be_are_refused(own, words):
    with pytest.raises(ValueError, match=words):
        replace(device(lanes=2), own_lanes=own)


def test_domains_are_of_a_single_device():
    found = params(devices=2)
    with pytest.raises(ValueError, match="single device"):
        SchedulerParams(
            device=replace(found.device, own_lanes=(("a", (OWN,)),)),
            more_devices=found.more_devices,
        )


def test_a_task_arrives_unprepared_and_is_prepared_while_its_lane_is_taken():
    made = world(parallelism=1)
    ready(made, 0, "own", run_ns=50 * MS)
    made.tell(TaskArrived(made.tasks.setdefault(1, task(1, domain="own", arrived_ns=made.now))))
    made.advance(20 * MS)
    assert 1 in made.preparing
    made.prepare(1)
    assert (1, OWN) in launched(made.end(OWN))
