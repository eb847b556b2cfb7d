"""Requests that are refused by the dozen do not keep lanes of a lower priority from their runs."""

from types import SimpleNamespace

import grpc
import pytest

from bench.kit.waiting import PATIENCE_S
from serve.server import driver
from tests.processes import wait_for
from tests.server.test_fronts_agree import both_fronts, message

REFUSED = 4 * driver._REFUSALS_IN_A_ROW
#: As in the configuration of `both_fronts`.
MOST_QUEUED = 4


@pytest.fixture(scope="module")
def native(tmp_path_factory, trouble):
    with both_fronts(tmp_path_factory.mktemp("way"), trouble.root) as ((_, call), *_):
        yield call


@pytest.fixture
def pauses(monkeypatch):
    found = []
    monkeypatch.setattr(driver, "time", SimpleNamespace(sleep=found.append))
    return found


def test_lanes_with_runs_get_a_moment_after_some_refusals(native, trouble, pauses):
    with trouble.holding() as graph:
        held = message()
        held.model_name = "mischief"
        for one, array in zip(held.inputs, (graph.x, graph.edge_index), strict=True):
            one.shape[:] = array.shape
        held.raw_input_contents[:] = [graph.x.tobytes(), graph.edge_index.tobytes()]
        running = native.future(held.SerializeToString(), timeout=PATIENCE_S)
        wait_for(trouble.running, "a run")
        small = message().SerializeToString()
        calls = [native.future(small, timeout=PATIENCE_S) for _ in range(MOST_QUEUED + REFUSED)]
        wait_for(lambda: sum(call.done() for call in calls) >= REFUSED, "the refusals")
    codes = [call.code() for call in (running, *calls)]
    refused = codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert refused >= REFUSED
    assert codes.count(grpc.StatusCode.OK) == len(codes) - refused
    # Several may be refused in a turn, which ends before it is looked at how many there were.
    assert 1 <= len(pauses) <= refused // driver._REFUSALS_IN_A_ROW


def test_requests_that_are_answered_make_nobody_wait(native, pauses):
    for _ in range(REFUSED):
        native(message().SerializeToString(), timeout=PATIENCE_S)
    assert pauses == []
