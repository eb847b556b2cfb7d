"""Intake: a call becomes a task, or leaves nothing behind."""

import os
import threading
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from serve.core.types import NO_LIMITS
from serve.errors import NotReady, UnknownName
from serve.ipc.shared_pool import SharedPool
from serve.server.api import BetterElsewhere, Room, Tensor
from serve.server.intake import Intake
from serve.server.regions import PIECE_BYTES, Regions
from tests.server.test_request_inputs import Estimator
from tests.server.test_staging import EDGES, NODES, call


class World:
    """A driver and a catalogue that serve `entries` one after the other."""

    #: Of graphs that are shared out.
    part = None

    def __init__(self, pool):
        self.pool = pool
        self.lock = threading.Lock()
        self.entries = []
        self.accepted = []
        devices = [
            SimpleNamespace(
                budget_bytes=budget_bytes,
                params=SimpleNamespace(device=SimpleNamespace(slots=slots)),
            )
            for budget_bytes, slots in ((50, 1), (40, 2))
        ]
        self.scheduler = SimpleNamespace(prepares_at_once=True, devices=devices)
        self.intake = Intake(
            self,
            self,
            pool,
            self,
            lock=self.lock,
            check_finite=True,
            counts_shared_once=True,
        )

    def serve(self, **facts):
        signature = SimpleNamespace(
            narrow_edges=False,
            accepts_empty=False,
            accepts_edgeless=False,
            needs_sorted_batch=False,
        )
        entry = SimpleNamespace(
            key=f"m:{len(self.entries)}",
            spec=SimpleNamespace(inputs=("x", "edge_index"), interface=None, domain=""),
            signature=signature,
            estimator=Estimator(counts_loops=False),
            retired=False,
            limits=NO_LIMITS,
            **facts,
        )
        self.entries.append(entry)
        return entry

    def get(self, name, version, request_id):
        if not self.entries:
            raise UnknownName(f"unknown model '{name}'")
        return self.entries[0]

    def version(self, name, number):
        return self.get(name, str(number), None) if number == 1 else None

    def factor_of(self, entry):
        return 2.0

    @property
    def requests(self):
        return self.accepted

    def accept(self, event, ticket):
        assert self.lock.locked()
        assert event.task == ticket.task
        self.accepted.append(ticket)


@pytest.fixture
def world():
    pool = SharedPool(1 << 20)
    yield World(pool)
    pool.close()


def test_a_call_becomes_a_staged_task(world):
    entry = world.serve()
    ticket = world.intake.submit(call())
    assert world.accepted == [ticket]
    task = ticket.task
    assert (task.model, task.num_nodes, task.num_edges) == (entry.key, NODES, EDGES)
    assert task.qos.target_ns == 2 * task.estimate.solo_ns
    assert ticket.inputs.early_ns is not None
    assert ticket.request_uid.endswith(f"-{task.task_id}")


def test_inputs_wait_where_the_scheduler_says_when(world):
    world.serve()
    world.scheduler.prepares_at_once = False
    assert world.intake.submit(call()).inputs.staged is None


def test_content_that_is_wrong_is_left_for_the_scheduler_to_ask_for(world):
    """It may refuse the request for another reason first."""
    world.serve()
    ticket = world.intake.submit(call(edge_index=np.full((2, EDGES), NODES)))
    assert world.accepted == [ticket]
    assert (ticket.inputs.early_ns, world.pool.used_bytes) == (None, 0)


def test_a_request_to_a_version_that_was_just_replaced_goes_to_its_successor(world):
    old, new = world.serve(), world.serve()
    get = world.get

    def replaced_after_the_look_up(name, version, request_id):
        found = get(name, version, request_id)
        if found is old:
            old.retired = True
            world.entries = [new]
        return found

    world.get = replaced_after_the_look_up
    ticket = world.intake.submit(call())
    assert ticket.task.model == new.key
    ticket.inputs.release()
    assert world.pool.used_bytes == 0, "what was staged for the old version"


def test_an_error_on_the_way_leaves_nothing_staged(world):
    entry = world.serve()

    def fail(*size, **options):
        raise NotReady("no estimate")

    entry.estimator.estimate = fail
    with pytest.raises(NotReady):
        world.intake.submit(call())
    assert (world.accepted, world.pool.used_bytes) == ([], 0)
    assert not world.lock.locked()


def test_a_movable_request_that_had_better_be_elsewhere_leaves_nothing(world):
    entry = world.serve()
    asked = []
    world.intake.moves = lambda task, room: asked.append((task, room)) or True
    assert world.intake.submit(call()) in world.accepted
    assert not asked
    with pytest.raises(BetterElsewhere) as caught:
        world.intake.submit(replace(call(), movable=True))
    ((task, room),) = asked
    assert (caught.value.task, task.model) == (task, entry.key)
    assert room == Room(unanswered=1, slots=3, budget_bytes=50)
    assert len(world.accepted) == 1
    assert world.pool.used_bytes == world.accepted[0].inputs.staged.block.size_bytes
    world.intake.moves = lambda task, room: False
    assert world.intake.submit(replace(call(), movable=True)) in world.accepted


@pytest.fixture
def in_memory_of_the_client():
    """A call whose features, of several pieces, lie in shared memory; they, and their file."""
    features = np.arange(2 * PIECE_BYTES // 4, dtype=np.float32).reshape(NODES - 1, -1)
    features = np.concatenate([features, features[:1]])
    memory = shared_memory.SharedMemory(create=True, size=features.nbytes)
    memory.buf[: features.nbytes] = features.tobytes()
    regions = Regions()
    regions.register("r", memory.name, 0, features.nbytes)
    found = call()
    part = regions.part("r", 0, features.nbytes)
    found.tensors["x"] = Tensor("FP32", features.shape, part)
    yield found, features, Path("/dev/shm") / memory.name
    memory.close()
    memory.unlink()


def test_a_recorded_payload_has_every_piece_of_shared_memory(in_memory_of_the_client):
    asked, features, _ = in_memory_of_the_client
    assert bytes(asked.payload().raws[0]) == features.tobytes()


def test_an_accepted_request_goes_on_whatever_comes_of_its_record(world, in_memory_of_the_client):
    asked, _, memory = in_memory_of_the_client
    world.serve()
    world.scheduler.prepares_at_once = False
    os.truncate(memory, 100)
    recorded = []
    world.intake.payloads = SimpleNamespace(write=lambda *what: recorded.append(what))
    assert world.accepted == [world.intake.submit(asked)]
    assert not recorded
    whole = world.intake.submit(call())
    assert [uid for uid, *_ in recorded] == [whole.request_uid]


def test_names_that_clients_make_up_are_no_labels(world):
    world.serve()
    known = world.intake.refusal("m", "1", "c", 0, NotReady("later"))
    unloaded = world.intake.refusal("m", "77", "c", 0, NotReady("version 77 of 'm' is UNLOADING"))
    unknown = world.intake.refusal("hello", "7", "c", 0, UnknownName("unknown model 'hello'"))
    found = [(r.model, r.version) for r in (known, unloaded, unknown)]
    assert found == [("m", "1"), ("m", ""), ("unknown", "")]
    assert known.request_uid != unknown.request_uid
