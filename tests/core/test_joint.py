"""Tasks of a joint request: admitted together, and their common inputs counted once."""

import pytest
from msgspec.structs import replace

from serve.core.commands import AnswerTask, LaunchTask, ReleaseTask
from serve.core.events import DrainStarted, TaskCancelled, TenantsChanged
from serve.core.types import (
    Bytes,
    InputBlock,
    LaneId,
    Rejected,
    RejectReason,
    TaskId,
    TenantRules,
    Withdrawn,
)
from tests.builders import MS, params, task, unions_saving
from tests.core.world import World, ready

L0, L1 = LaneId(0), LaneId(1)
MODELS = ("gcn:1", "sage:1", "gat:1")


@pytest.fixture
def start():
    """Make a world with its lanes up; everything is finished and checked at the end."""
    worlds = []

    def make(lanes=2, **choices):
        world = World(params(**({"policy": "fifo", "lanes": lanes} | choices)))
        worlds.append(world)
        for lane in range(lanes):
            world.lane_ready(LaneId(lane))
        return world

    yield make
    for world in worlds:
        world.finish_everything()


def joint(first=0, *, shared=600, reserves=(1000, 1000, 1000), models=MODELS, **choices):
    """Tasks that share `shared` bytes of inputs."""
    block = InputBlock(TaskId(first), Bytes(shared)) if shared else None
    made = [
        task(first + at, reserve=reserve, model=model, **choices)
        for at, (reserve, model) in enumerate(zip(reserves, models, strict=True))
    ]
    return tuple(replace(one, block=block) for one in made)


def launched(commands):
    return [command.task_id for command in commands if isinstance(command, LaunchTask)]


def test_all_are_admitted_and_run_side_by_side(start):
    world = start()
    assert launched(world.arrive_jointly(joint(), world.now)) == [0, 1]
    assert launched(world.end(L0)) == [2]


def test_common_inputs_are_counted_once(start):
    world = start(lanes=3, budget=1800)
    # By themselves they would take 3,000.
    assert launched(world.arrive_jointly(joint(), world.now)) == [0, 1, 2]
    ledger = world.scheduler.parts.board.ledger
    assert ledger.reserved_bytes == 600 + 3 * 400
    world.end(L0)
    assert ledger.reserved_bytes == 600 + 2 * 400
    world.end(L1)
    world.end(LaneId(2))
    assert ledger.reserved_bytes == 0


def test_inputs_of_two_requests_are_counted_apart(start):
    world = start(lanes=4, budget=3600)
    world.arrive_jointly(joint(0)[:2], world.now)
    world.arrive_jointly(joint(3)[:2], world.now)
    assert world.scheduler.parts.board.ledger.reserved_bytes == 2 * (600 + 2 * 400)


def test_a_request_of_more_models_than_its_tenant_s_rate_enters_and_each_counts(start):
    world = start(lanes=3)
    world.tell(TenantsChanged((TenantRules("slow", requests_per_s=1.0),)))
    world.arrive_jointly(joint(0, tenant="slow"), world.now)
    assert not world.answers
    world.advance(2999 * MS)
    world.arrive_jointly(joint(3, tenant="slow"), world.now)
    assert world.answers[3].reason is RejectReason.TENANT_LIMIT
    world.advance(2 * MS)
    world.arrive_jointly(joint(6, tenant="slow"), world.now)
    assert 6 not in world.answers


@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_that_never_fits_refuses_all(start, at):
    reserves = [1000, 1000, 1000]
    reserves[at] = 5000
    world = start(budget=4000)
    commands = world.arrive_jointly(joint(reserves=reserves), world.now)
    assert [type(command) for command in commands] == [AnswerTask, ReleaseTask] * 3
    for task_id in range(3):
        outcome = world.answers[task_id]
        assert isinstance(outcome, Rejected)
        assert outcome.reason is RejectReason.TOO_BIG
        assert outcome.task_id == at
        assert outcome.message.startswith("needs 5000 bytes")


def test_the_queue_has_room_for_all_or_none(start):
    world = start(lanes=1, max_queue=4)
    world.arrive(task(0, target_ns=900 * MS))
    world.arrive(task(1, target_ns=900 * MS))
    world.arrive_jointly(joint(2, target_ns=900 * MS))
    assert {world.answers[one].reason for one in (2, 3, 4)} == {RejectReason.QUEUE_FULL}
    assert world.answers[2].retry_after_ns > 0
    world.arrive_jointly(joint(5, target_ns=900 * MS)[:2])
    assert not {5, 6} & world.answers.keys()


def test_a_draining_server_refuses_all(start):
    world = start()
    world.tell(DrainStarted())
    world.arrive_jointly(joint())
    assert {world.answers[one].reason for one in range(3)} == {RejectReason.DRAINING}


def test_one_in_quarantine_refuses_all(start):
    world = start(lanes=1)
    while "sage:1" not in world.quarantined:
        if not world.on_lane:
            ready(world, task(len(world.tasks), model="sage:1", arrived_ns=world.now))
        world.advance(100 * MS)
        world.lane_lost(L0)
        world.lane_ready(L0)
        while world.preparing:
            world.prepare(min(world.preparing))
    world.arrive_jointly(joint(10))
    for task_id in range(10, 13):
        outcome = world.answers[task_id]
        assert outcome.reason is RejectReason.QUARANTINED
        assert outcome.task_id == 11
        assert outcome.message.startswith("its runs ended")


def test_the_end_of_one_leaves_the_others(start):
    world = start(lanes=1)
    world.arrive_jointly(joint(), world.now)
    world.tell(TaskCancelled(TaskId(1)))
    assert isinstance(world.answers[1], Withdrawn)
    assert launched(world.end(L0)) == [2]


def test_they_join_no_union(start):
    world = start(lanes=1, unions=unions_saving(MS), prepare_ahead=9)
    ready(world, task(0))
    for first in (1, 4):
        world.arrive_jointly(joint(first, models=("gcn:1",) * 3, target_ns=900 * MS), world.now)
    commands = world.end(L0)
    assert [command.companions for command in commands if isinstance(command, LaunchTask)] == [()]
