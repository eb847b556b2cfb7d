"""Which runs are captured, when, and what makes room: with captures that do nothing."""

import pytest
import torch

from serve.lane.cuda.replays import FixedRun, NoRoom, Replays, RunShape
from serve.lane.cuda.streams import StreamKind

AFTER = 3


class Fake:
    """Captures anything, unless told otherwise, into room for so many."""

    def __init__(self, room=100):
        self.room = room
        self.live: list[RunShape] = []
        self.tries: list[RunShape] = []
        self.refuses: dict[RunShape, Exception] = {}

    def __call__(self, shape):
        self.tries.append(shape)
        if shape in self.refuses:
            raise self.refuses[shape]
        if len(self.live) >= self.room:
            raise NoRoom("they need more memory than there is")
        self.live.append(shape)
        return FixedRun({}, Run(self, shape))


class Run:
    output = torch.zeros(1)

    def __init__(self, fake, shape):
        self._fake, self._shape = fake, shape

    def launch(self):
        raise AssertionError("who decides does not launch")

    def forget(self):
        self._fake.live.remove(self._shape)


@pytest.fixture
def fake():
    return Fake()


def shape(nodes, key="m", kind=StreamKind.ORDINARY):
    return RunShape(key, (("x", "float32", (nodes, 8)), ("edge_index", "int64", (2, 50))), kind)


def replays(fake, most=32):
    return Replays(fake, most=most, after=AFTER)


def recur(found, wanted, times=AFTER, *, idle=True):
    """The lane runs that shape so often; how often it was replayed."""
    replayed = 0
    for _ in range(times):
        replayed += found.find(wanted) is not None
        found.capture_due(idle=idle)
    return replayed


def test_a_shape_is_captured_when_it_has_recurred_and_replayed_from_then_on(fake):
    found = replays(fake)
    assert recur(found, shape(10), AFTER - 1) == 0
    assert recur(found, shape(11), AFTER - 1) == 0
    assert fake.tries == []
    assert recur(found, shape(10), 5) == 4
    assert fake.live == [shape(10)]
    # Another dtype or stream is another run.
    narrow = RunShape("m", (("x", "float32", (10, 8)), ("edge_index", "int32", (2, 50))))
    assert found.find(narrow) is None
    assert found.find(shape(10, kind=StreamKind.URGENT)) is None


def test_a_busy_lane_captures_later(fake):
    found = replays(fake)
    assert recur(found, shape(10), 4 * AFTER - 1, idle=False) == 0
    assert fake.tries == []
    assert recur(found, shape(10), 2, idle=False) == 1
    assert fake.live == [shape(10)]


def test_the_one_not_used_for_longest_makes_room(fake):
    found = replays(fake, most=2)
    for nodes in (1, 2):
        recur(found, shape(nodes))
    assert found.find(shape(1)) is not None
    recur(found, shape(3))
    assert fake.live == [shape(1), shape(3)]
    # Who was put out starts anew.
    assert recur(found, shape(2), AFTER - 1) == 0
    assert len(found) == 2


def test_memory_makes_room_too_until_nothing_is_left(fake, caplog):
    fake.room = 2
    found = replays(fake)
    for nodes in (1, 2, 3):
        recur(found, shape(nodes))
    assert fake.live == [shape(2), shape(3)]
    fake.refuses[shape(9)] = NoRoom("too large")
    recur(found, shape(9), 10 * AFTER)
    # Tried with more and more room, and never again.
    assert fake.tries.count(shape(9)) == 3
    assert fake.live == []
    assert caplog.text.count("are launched: too large") == 1


def test_what_cannot_be_captured_is_tried_once_and_costs_the_others_nothing(fake, caplog):
    found = replays(fake)
    recur(found, shape(1))
    fake.refuses[shape(2)] = RuntimeError("operation not permitted when stream is capturing")
    assert recur(found, shape(2), 10 * AFTER) == 0
    assert fake.tries.count(shape(2)) == 1
    assert fake.live == [shape(1)]
    lines = [line for line in caplog.text.splitlines() if "are launched" in line]
    assert len(lines) == 1
    assert "x [2, 8]" in lines[0]
    assert "not permitted" in lines[0]


def test_what_can_be_launched_no_more_is_given_up(fake):
    found = replays(fake)
    recur(found, shape(1))
    found.give_up(shape(1), "cudaGraphLaunch: refused")
    assert fake.live == []
    assert recur(found, shape(1), 10 * AFTER) == 0


def test_a_model_that_goes_takes_its_runs_along(fake):
    found = replays(fake)
    for key in ("a", "b"):
        recur(found, shape(1, key))
    fake.refuses[shape(2, "a")] = RuntimeError("no")
    recur(found, shape(2, "a"))
    found.find(shape(3, "a"))
    found.forget("a")
    assert fake.live == [shape(1, "b")]
    # Nor is what was known of it: another model may come under its name.
    fake.refuses.clear()
    assert recur(found, shape(2, "a"), AFTER + 1) == 1


def test_a_run_that_became_due_with_its_model_gone_is_not_captured(fake):
    found = replays(fake)
    for _ in range(AFTER):
        found.find(shape(1))
    found.forget("m")
    found.capture_due(idle=True)
    assert fake.tries == []


def test_shapes_that_never_recur_are_not_counted_for_ever(fake):
    found = replays(fake)
    for nodes in range(3000):
        found.find(shape(nodes))
    assert len(found._asked) <= 1024
    assert recur(found, shape(2999), AFTER) == 1
