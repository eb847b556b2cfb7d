"""What the main process makes of packets: a lane that sends what it should not is ended."""

import contextlib
import os
import socket
import time
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.core.types import LaneId
from serve.ipc.messages import (
    HotSetHeld,
    LaneHolds,
    LaneStarted,
    MemoryTaken,
    ModelLoaded,
    ModelProbed,
    Progress,
    SettingsRestored,
    TableMapped,
    TakesLess,
    TaskDone,
    TaskError,
    encode,
)
from serve.ipc.shared_pool import SharedPool
from serve.models.model_signature import Signature
from serve.server.lanes.listener import LaneDown, LaneUp
from serve.server.lanes.pool import LanePool

LANE = LaneId(0)
SIGNATURE = Signature(
    num_features=4, edge_dim=None, num_outputs=2, rows="node",
    accepts_empty=True, accepts_edgeless=True, deterministic=True,
)  # fmt: skip


@pytest.fixture
def mute_pool(monkeypatch):
    """A pool of one lane whose process is this test; what it says, and its kills."""
    shared = SharedPool(1 << 16)
    pool = LanePool(((),), shared, keep_bytes=0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kills = []
    monkeypatch.setattr("serve.server.lanes.processes.kill", kills.append)
    (process,) = pool._processes
    pool._listener.attach(process, SimpleNamespace(pid=os.getpid()), [ours])
    theirs.send(encode(LaneStarted(1, True)))
    assert pool.poll(time.monotonic_ns()) == [(LANE, LaneUp())]
    yield pool, theirs, kills
    pool._listener.detach(process)
    pool.stop()
    theirs.close()
    shared.close()


def test_a_pool_without_a_thread_for_restarts_leaves_nothing(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child, ended = SimpleNamespace(pid=os.getpid()), []
    for name, told in (("start", lambda *_: (child, [ours])), ("kill", ended.append)):
        monkeypatch.setattr(f"serve.server.lanes.processes.{name}", told)
    monkeypatch.setattr("serve.server.lanes.processes.reap", lambda _: "gone")

    def no_thread(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("serve.server.lanes.restarts.Thread.start", no_thread)
    shared = SharedPool(1 << 16)
    pool = LanePool(((),), shared, keep_bytes=0)
    with theirs, pytest.raises(RuntimeError, match="new thread"):
        pool.start()
    assert ours.fileno() == -1
    assert ended == [child]
    pool.stop()
    shared.close()


def _packets():
    """Any bytes, and what lanes say with bytes changed."""
    said = [
        encode(TaskDone(7, (3,), 2, 1000, 5, None)),
        encode(TaskError(7, "model_error", "words")),
        encode(ModelLoaded("m")),
        encode(LaneStarted(1, True)),
        encode(MemoryTaken(1 << 40)),
        encode(HotSetHeld("community", 1)),
        encode(TakesLess(7, 1 << 20)),
        encode(LaneHolds(1 << 30)),
        encode(SettingsRestored("m", "dtype")),
        encode(TableMapped(1)),
    ]
    changed = st.tuples(
        st.sampled_from(said), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)))
    ).map(_with_bytes)
    return st.one_of(st.binary(min_size=1, max_size=300), changed)


def _with_bytes(changed):
    packet, changes = bytearray(changed[0]), changed[1]
    for place, value in changes:
        packet[place % len(packet)] = value
    return bytes(packet)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packet=_packets())
def test_no_packet_of_a_lane_does_more_than_end_it(mute_pool, packet):
    pool, theirs, kills = mute_pool
    kills.clear()
    pool._lanes[LANE].ignored = False
    theirs.send(packet)
    said = pool.poll(time.monotonic_ns())
    assert len(said) + len(kills) == 1, "taken as said, or the lane is ended"


@pytest.mark.parametrize(
    "message",
    [
        LaneStarted(2, True),
        MemoryTaken(1 << 40),
        TakesLess(7, 0),
        HotSetHeld("community", 1),
        Progress("time", 0.5),
        ModelProbed(SIGNATURE, b""),
    ],
)
def test_a_lane_that_says_what_others_say_is_ended(mute_pool, message):
    """A budget that it could lower would be everybody's."""
    pool, theirs, kills = mute_pool
    theirs.send(encode(message))
    assert pool.poll(time.monotonic_ns()) == []
    assert len(kills) == 1


def test_a_lane_that_never_stops_talking_is_not_listened_to_for_ever(mute_pool):
    pool, theirs, _ = mute_pool
    theirs.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += bool(theirs.send(encode(ModelLoaded("m"))))
    heard = len(pool.poll(time.monotonic_ns()))
    assert 0 < heard < sent
    while more := pool.poll(time.monotonic_ns()):
        heard += len(more)
    assert heard == sent


def test_a_process_that_does_not_even_die_is_given_up(mute_pool, monkeypatch):
    pool, theirs, _ = mute_pool
    monkeypatch.setattr("serve.server.lanes.lane_handle._GONE_AFTER_NS", 0)
    freed = []
    monkeypatch.setattr(
        pool._listener.restarts, "restart", lambda process, child: freed.append(child)
    )
    theirs.send(b"no packet")
    said = []
    while not said:
        said = pool.poll(time.monotonic_ns())
    assert said == [(LANE, LaneDown((LANE,)))]
    assert len(freed) == 1
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool._listener.attach(pool._processes[0], freed[0], [ours])
    theirs.close()
