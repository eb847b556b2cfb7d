"""Trust domains: their tasks run on lanes of their own, and neither takes the other's."""

import pytest

from serve.core.commands import LaunchTask, RecycleLane, RemoveLane
from serve.core.events import DomainClosed, LaneReady, LaneRemoved, TaskArrived
from serve.core.types import LaneId
from serve.errors import InvariantViolation
from tests.builders import MS, params, task
from tests.core.world import World

SHARED, OWN = LaneId(0), LaneId(1)


def world(discipline: str = "rolling", *, own: int = 1, **others) -> World:
    """A shared lane with a slot unless told, all up, and `own` lanes up of the domain `own`."""
    made = World(params(**({"lanes": 1, "discipline": discipline, "policy": "fifo"} | others)))
    for lane_id in [*made.device_of, *made.open("own")[:own]]:
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
    made = world(discipline, lanes=2)
    own = LaneId(2)
    assert launched(ready(made, 0, "own", run_ns=50 * MS)) == [(0, own)]
    assert launched(ready(made, 1, "own")) == []
    assert launched(ready(made, 2)) == [(2, SHARED)]
    # And gets it when it comes free.
    assert (1, own) in launched(made.end(own))


def test_a_domain_without_a_lane_that_is_up_waits_for_it():
    made = world()
    made.lane_lost(OWN)
    assert launched(ready(made, 0, "own")) == []
    assert launched(ready(made, 1)) == [(1, SHARED)]
    made.end(SHARED)
    assert launched(made.lane_ready(OWN)) == [(0, OWN)]


def test_lanes_of_a_domain_are_no_slots_more():
    made = world(lanes=2, own=2)
    assert launched(ready(made, 0, "own", run_ns=9 * MS)) == [(0, LaneId(2))]
    assert launched(ready(made, 1, run_ns=9 * MS)) == [(1, SHARED)]
    assert launched(ready(made, 2, "own")) == [], "a lane of its own is idle"
    assert (2, LaneId(3)) in launched(made.end(SHARED))


def test_memory_is_one_ledger():
    made = world(budget=100, lanes=2)
    assert launched(ready(made, 0, "own", reserve=80)) == [(0, LaneId(2))]
    assert launched(ready(made, 1, reserve=40)) == []
    assert made.scheduler.reserved_bytes == 80
    assert launched(made.end(LaneId(2))) == [(1, SHARED)]


@pytest.mark.parametrize(
    "options", [{}, {"parallelism": 2}, {"parallelism": 2, "can_suspend": True}]
)
def test_a_domain_gets_as_many_lanes_as_may_execute_and_keeps_them(options):
    made = World(params(lanes=4, **options))
    slots = made.params.device.slots
    assert made.open("a") == [LaneId(4 + number) for number in range(slots)]
    assert made.open("b") == [LaneId(4 + slots + number) for number in range(slots)]
    assert made.open("a") == []


def test_a_lane_of_a_closed_domain_goes_when_its_run_has_ended():
    made = world(lanes=2, own=2)
    ready(made, 0, "own", timeout_ns=MS, run_ns=9 * MS)
    made.advance(2 * MS)
    assert 0 in made.answers
    assert made.close("own") == [LaneId(3)], "the idle one"
    assert launched(ready(made, 1)) == [(1, SHARED)]
    removed = made.end(LaneId(2))
    assert [one.lane_id for one in removed if isinstance(one, RemoveLane)] == [LaneId(2)]
    assert made.scheduler.lanes_up == 2
    made.finish_everything()


def test_a_lane_that_ends_while_it_is_to_go_is_not_expected_back():
    made = world()
    ready(made, 0, "own", timeout_ns=MS, run_ns=9 * MS)
    made.advance(2 * MS)
    assert made.close("own") == []
    assert made.lane_lost(OWN)[-1:] == [RemoveLane(OWN)]
    with pytest.raises(InvariantViolation, match=r"lane 1 is not one of \[0\]"):
        made.scheduler.handle(LaneReady(OWN), made.now)


def test_a_domain_that_opens_again_keeps_the_lanes_that_have_not_gone():
    made = world(lanes=2, own=2)
    ready(made, 0, "own", timeout_ns=MS, run_ns=9 * MS)
    made.advance(2 * MS)
    assert made.close("own") == [LaneId(3)]
    assert made.open("own") == [LaneId(4)], "3 may not have ended yet"
    made.end(LaneId(2))
    assert made.domain_of == {2: "own", 4: "own"}
    made.lane_gone(LaneId(3))
    assert made.open("other") == [LaneId(3), LaneId(5)]


def test_an_id_is_free_once_nothing_is_left_of_the_lane():
    made = world()
    assert made.close("own") == [OWN]
    made.lane_gone(OWN)
    assert made.open("other") == [OWN]
    with pytest.raises(InvariantViolation, match="was not removed"):
        made.scheduler.handle(LaneRemoved(OWN), made.now)


def test_a_lane_that_starts_anew_is_removed_and_holds_up_no_other():
    made = world(lane_limit=10)
    assert RecycleLane(OWN, "memory") in made.measure(OWN, 11)
    assert made.close("own") == [OWN]
    assert made.measure(SHARED, 11) == [RecycleLane(SHARED, "memory")]


def test_a_domain_whose_task_waits_cannot_be_closed():
    made = world()
    made.lane_lost(OWN)
    ready(made, 0, "own")
    with pytest.raises(InvariantViolation, match="a task of it waits"):
        made.scheduler.handle(DomainClosed("own"), made.now)


def test_domains_are_of_a_single_device():
    made = World(params(devices=2))
    with pytest.raises(InvariantViolation, match="single device"):
        made.open("own")


def test_a_task_arrives_unprepared_and_is_prepared_while_its_lane_is_taken():
    made = world()
    ready(made, 0, "own", run_ns=50 * MS)
    made.tell(TaskArrived(made.tasks.setdefault(1, task(1, domain="own", arrived_ns=made.now))))
    made.advance(20 * MS)
    assert 1 in made.preparing
    made.prepare(1)
    assert (1, OWN) in launched(made.end(OWN))
