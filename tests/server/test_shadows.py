"""Shadows: which requests are run again, how they compare, and when they are skipped."""

import threading

import numpy as np
import pytest
from msgspec.structs import replace

from bench.kit.waiting import wait_for
from serve.core.versions.router import VersionRouter
from serve.core.versions.rules import VersionRules
from serve.errors import ModelError, QueueFull, RequestCancelled
from serve.server.api import InferCall, InferResult, Tensor
from serve.server.shadows import Shadows
from tests.obs.builders import record

OUTPUT = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32)


def result_of(output=OUTPUT, **fields):
    return InferResult({"output": output}, record("u", **fields))


def call_of(number=0, **fields):
    data = memoryview(bytearray(np.ones((2, 2), np.float32).tobytes()))
    tensors = {"x": Tensor("FP32", (2, 2), data)}
    return InferCall("m", "", tensors, 0, f"r{number}", chosen="1", **fields)


class World:
    """Shadows over an engine that answers what the test says."""

    def __init__(self):
        self.router = VersionRouter()
        self.router.set_rules("m", VersionRules(((1, 100.0),), shadow=3))
        self.calls, self.answers = [], []
        self.idle = None
        self.go = threading.Event()
        self.go.set()
        self.shadows = Shadows(self.router, self.run, lambda told: setattr(self, "idle", told))

    def run(self, call):
        self.calls.append(call)
        self.go.wait()
        answer = self.answers.pop(0) if self.answers else result_of()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def counts(self):
        return self.shadows.counts("m", 3)

    def ended(self, count=1):
        def total():
            counts = self.counts
            return counts.compared + counts.failed + counts.skipped

        wait_for(lambda: total() >= count, "the end of the shadows")
        return self.counts


@pytest.fixture
def world():
    found = World()
    yield found
    found.go.set()
    found.shadows.begin_stop()
    found.shadows.stop()


def test_a_request_is_run_again_by_the_shadow_with_the_same_seed(world):
    world.shadows.answered(call_of(timeout_ns=5, qos_target_ns=7), result_of(seed=99))
    counts = world.ended()
    assert (counts.compared, counts.different, counts.most_absolute) == (1, 0, 0.0)
    (call,) = world.calls
    assert (call.version, call.seed, call.timeout_ns, call.client_id) == ("3", 99, None, "")
    assert bytes(call.tensors["x"].data) == np.ones((2, 2), np.float32).tobytes()


def test_the_inputs_are_copied(world):
    world.go.clear()
    call = call_of()
    world.shadows.answered(call, result_of())
    call.tensors["x"].data[:] = bytes(16)
    world.go.set()
    world.ended()
    assert bytes(world.calls[0].tensors["x"].data) != bytes(16)


@pytest.mark.parametrize(
    ("output", "different", "absolute"),
    [
        (OUTPUT + np.float32(0.001), 0, 0.001),
        (OUTPUT + np.float32(0.5), 1, 0.5),
        (OUTPUT[:1], 1, np.inf),
        (np.where(OUTPUT > 3, np.float32(np.nan), OUTPUT), 1, np.inf),
    ],
)
def test_answers_are_compared(world, output, different, absolute):
    world.answers = [result_of(output)]
    world.shadows.answered(call_of(), result_of())
    counts = world.ended()
    assert counts.different == different
    assert counts.most_absolute == pytest.approx(absolute, rel=1e-3)
    assert counts.most_relative == pytest.approx(absolute / 4, rel=1e-3)


def test_the_same_places_of_nan_are_the_same(world):
    output = np.array([[np.nan, 1.0, np.inf]], np.float32)
    world.answers = [result_of(output.copy())]
    world.shadows.answered(call_of(), result_of(output))
    assert world.ended().different == 0


def test_it_is_tried_again_when_the_server_is_idle(world):
    world.answers = [QueueFull("busy", 0), RequestCancelled("given up")]
    world.shadows.answered(call_of(), result_of())
    for tries in (1, 2):
        wait_for(lambda tries=tries: len(world.calls) == tries, "a try")
        assert world.idle is not None
        world.idle()
    assert world.ended().compared == 1
    assert len(world.calls) == 3


def test_an_error_of_the_shadow_is_counted_and_not_tried_again(world):
    world.answers = [ModelError("no")]
    world.shadows.answered(call_of(), result_of())
    assert world.ended().failed == 1
    assert len(world.calls) == 1


def test_a_bug_costs_one_shadow(world):
    world.answers = [ZeroDivisionError()]
    world.shadows.answered(call_of(0), result_of())
    world.shadows.answered(call_of(1), result_of())
    counts = world.ended(2)
    assert (counts.failed, counts.compared) == (1, 1)


def test_more_than_may_wait_are_skipped(world):
    world.go.clear()
    for number in range(30):
        world.shadows.answered(call_of(number), result_of())
    world.go.set()
    counts = world.ended(30)
    assert counts.skipped >= 20
    assert counts.compared + counts.skipped == 30


def test_what_is_not_to_be_shadowed_is_not(world):
    world.shadows.answered(replace(call_of(), chosen="", version="1"), result_of())
    world.router.set_rules("m", VersionRules(((1, 100.0),)))
    world.shadows.answered(call_of(), result_of())
    world.router.set_rules("m", VersionRules(((1, 100.0),), shadow=3, shadow_percent=1e-9))
    world.shadows.answered(call_of(), result_of())
    assert world.calls == []
    assert world.shadows.all_counts() == {}


def test_a_graph_that_has_changed_meanwhile_is_not_compared(world):
    world.answers = [result_of(graph="g", graph_version=2)]
    world.shadows.answered(call_of(), result_of(graph="g", graph_version=1))
    assert world.ended().skipped == 1


def test_nothing_runs_after_the_stop(world):
    world.shadows.begin_stop()
    world.shadows.answered(call_of(), result_of())
    assert world.counts.skipped == 1
    assert world.calls == []


def test_without_a_thread_shadows_are_skipped_until_there_is_one(world, monkeypatch):
    def cannot_start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot_start)
        world.shadows.answered(call_of(), result_of())
    assert world.ended().skipped == 1
    world.shadows.answered(call_of(1), result_of())
    assert world.ended(2).compared == 1
