"""Requests that are split by where their nodes live: the same answers, and how failures end."""

import threading
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zmq", reason="ZeroMQ is not installed: pip install 'gnnserve[cluster]'")

from serve.cluster.sent_parts import MOST_PART_S, SentPart, SentParts, part_message
from serve.core.types import Failed
from serve.errors import (
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    NotReady,
    QueueFull,
    RequestCancelled,
    TooBig,
)
from serve.graphs.shared_column import graph_state
from serve.graphs.updates import Change
from serve.rpc.elsewhere import HOPS, PART, origin_of
from serve.server.api import InferCall
from serve.server.outcomes import error_of
from serve.server.split import PartAnswer, Split, put_together
from serve.wire.messages import (
    RETRY_TRAILER,
    decode_request,
    encode_request,
    encode_response,
)
from tests.cluster.sharing import NODES, cluster, parts_of_graph, sampled
from tests.cluster.test_shared_rows import changed
from tests.rpc.fakes import model_info

SEED = st.integers(0, 2**64 - 1)
IDS = st.lists(st.integers(0, NODES - 1), min_size=1, max_size=30)


@pytest.fixture(scope="module", params=[2, 3, 5])
def servers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    graph = parts_of_graph(kind=np.uint8)
    with cluster(folder, request.param, with_edges=True, hot=0.1, graph=graph) as found:
        yield found


def run(snapshot, ids, fanouts, seed):
    """Return the rows of `ids` by a model of as many layers as fan-outs, which adds neighbours.

    Features are small integers, so sums are exact in any order.
    """
    _, edges, at, rows = sampled(snapshot, ids, fanouts, seed)
    for _ in fanouts:
        after = 2 * rows
        np.add.at(after, edges[1], rows[edges[0]])
        rows = after
    return rows[at]


def run_split(graphs, here, ids, fanouts, seed):
    """Return what the servers of `graphs` answer together, and the parts by server."""
    column = graphs[here].snapshot.column
    homes = np.where(column.here(ids), here, column.parts[ids])
    by_home = {home: np.flatnonzero(homes == home) for home in np.unique(homes).tolist()}
    own = by_home.pop(here, np.empty(0, np.int64))
    answers = []
    for home, at in by_home.items():
        snapshot = graphs[home].snapshot
        rows = run(snapshot, ids[at], fanouts, seed)
        state = graph_state(snapshot.version, snapshot.column)
        answers.append(PartAnswer(f"part {home}", at, {"output": rows}, state))
    split = Split(own, SentParts([], limit_s=1.0, left=lambda *_: None), 1 + len(answers))
    snapshot = graphs[here].snapshot
    mine = {"output": run(snapshot, ids[own], fanouts, seed)}
    state = graph_state(snapshot.version, snapshot.column)
    return put_together(split, mine, state, answers), by_home


@settings(max_examples=20, deadline=None)
@given(ids=IDS, hops=st.integers(1, 3), seed=SEED, data=st.data())
def test_with_all_neighbours_a_split_request_has_the_answer_of_the_whole_graph(
    servers, ids, hops, seed, data
):
    ids = np.array(ids, np.int64)
    here = data.draw(st.integers(0, servers.count - 1))
    found, _ = run_split(servers.graphs, here, ids, [-1] * hops, seed)
    expected = run(servers.whole.snapshot, ids, [-1] * hops, seed)
    assert found["output"].tobytes() == expected.tobytes()
    assert found["output"].dtype == expected.dtype


@settings(max_examples=10, deadline=None)
@given(ids=IDS, fanouts=st.lists(st.sampled_from([1, 2, -1]), min_size=1, max_size=3), seed=SEED)
def test_each_part_has_the_answer_that_its_nodes_have_alone(servers, ids, fanouts, seed):
    ids = np.array(ids, np.int64)
    found, by_home = run_split(servers.graphs, 0, ids, fanouts, seed)
    for at in by_home.values():
        alone = run(servers.whole.snapshot, ids[at], fanouts, seed)
        assert found["output"][at].tobytes() == alone.tobytes()


def test_parts_of_different_versions_are_never_put_together(tmp_path):
    ids = np.arange(NODES)
    add = Change(add_edges=np.array([[0], [1]]))
    with cluster(tmp_path, 2, with_edges=True) as two:
        # Of one hop that needs nobody else, or the rows themselves would be refused.
        own = [np.flatnonzero(two.parts == part) for part in range(2)]
        states = [graph_state(g.snapshot.version, g.snapshot.column) for g in two.graphs]
        assert states[0] == states[1]
        changed(two.graphs[1], add)
        new = two.graphs[1].snapshot
        answer = PartAnswer(
            "part 1 of the request, at b,", own[1], {"output": np.zeros((own[1].size, 1))},
            graph_state(new.version, new.column),
        )  # fmt: skip
        split = Split(own[0], SentParts([], limit_s=1.0, left=lambda *_: None), 2)
        mine = {"output": np.zeros((own[0].size, 1))}
        found = put_together(split, mine, states[0], [answer])
        assert isinstance(found, Failed)
        assert isinstance(error_of(found), NotReady)
        assert "at b, saw another version of the graph" in found.message
        changed(two.graphs[0], add)
        old = two.graphs[0].snapshot
        again = put_together(split, mine, graph_state(old.version, old.column), [answer])
        assert again["output"].shape == (ids.size, 1)


@pytest.mark.parametrize(
    "output",
    [None, np.zeros((2, 4), np.float32), np.zeros((3, 3), np.float32), np.zeros((2, 3))],
)
def test_an_answer_of_another_shape_fails_the_request(output):
    split = Split(np.array([0]), SentParts([], limit_s=1.0, left=lambda *_: None), 2)
    outputs = {} if output is None else {"output": output}
    answer = PartAnswer("part 1, at b,", np.array([1, 2]), outputs, "")
    mine = {"output": np.zeros((1, 3), np.float32)}
    found = put_together(split, mine, "", [answer])
    assert isinstance(found, Failed)
    assert "part 1, at b, answered output 'output' with" in found.message


class Refused(grpc.RpcError):
    def __init__(self, code, trailers=()):
        self._code, self._trailers = code, trailers

    def code(self):
        return self._code

    def details(self):
        return "why it did"

    def trailing_metadata(self):
        return self._trailers


class Future:
    """A call that has ended, or ends when it is cancelled."""

    def __init__(self, end=None):
        self.end, self.cancelled = end, threading.Event()

    def result(self):
        if self.end is None:
            self.cancelled.wait()
            raise grpc.FutureCancelledError
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    def cancel(self):
        self.cancelled.set()


def parts_of(*futures, limit_s=5.0):
    """Return parts that end as told, and what is heard of their ends."""
    heard = []
    there = SimpleNamespace(server="host:1", silent_until_s=0.0)
    sent = [SentPart(n, there, np.array([n]), each) for n, each in enumerate(futures, 1)]
    return SentParts(sent, limit_s=limit_s, left=lambda *counts: heard.append(counts)), heard


def given_answer():
    rows = np.ones((1, 3), np.float32)
    return encode_response("gcn", {"output": rows}, parameters={"graph_state": "1:a:b"})


@pytest.mark.parametrize(
    ("code", "trailers", "limit_s", "error"),
    [
        ("INVALID_ARGUMENT", (), 5.0, InvalidInput),
        ("UNAVAILABLE", (), 5.0, NotReady),
        ("NOT_FOUND", (), 5.0, NotReady),
        ("UNAUTHENTICATED", (), 5.0, NotReady),
        ("INTERNAL", (), 5.0, ModelError),
        ("RESOURCE_EXHAUSTED", (), 5.0, TooBig),
        ("RESOURCE_EXHAUSTED", ((RETRY_TRAILER, "7"),), 5.0, QueueFull),
        ("DEADLINE_EXCEEDED", (), 5.0, DeadlineExceeded),
        ("DEADLINE_EXCEEDED", (), MOST_PART_S, NotReady),
        ("CANCELLED", (), 5.0, RequestCancelled),
    ],
)
def test_a_part_that_fails_fails_the_request_and_is_named(code, trailers, limit_s, error):
    rest = Future()
    parts, heard = parts_of(
        Future(given_answer()), Future(Refused(grpc.StatusCode[code], trailers)), rest,
        limit_s=limit_s,
    )  # fmt: skip
    found = error_of(parts.answers())
    assert type(found) is error
    assert "host:1" in str(found)
    if isinstance(found, QueueFull):
        assert found.retry_after_ns == 7_000_000
    parts.end()
    parts.end()
    assert rest.cancelled.is_set()
    assert heard == [(1, 2)]


def test_what_is_no_answer_fails_the_request():
    parts, _ = parts_of(Future(b"\xff\xff"))
    found = error_of(parts.answers())
    assert isinstance(found, NotReady)
    assert "part 1 of the request, at host:1, sent no answer" in str(found)


def test_who_ends_the_request_ends_its_parts():
    parts, heard = parts_of(Future())
    threading.Timer(0.05, parts.end).start()
    assert isinstance(error_of(parts.answers()), RequestCancelled)
    assert heard == [(0, 1)]


def test_all_answers_come_in_the_places_of_their_ids():
    parts, heard = parts_of(Future(given_answer()), Future(given_answer()))
    found = parts.answers()
    assert [one.positions.tolist() for one in found] == [[1], [2]]
    assert {one.graph_state for one in found} == {"1:a:b"}
    parts.end()
    assert heard == [(2, 0)]


def test_a_part_is_asked_of_the_version_that_was_chosen_with_the_seed_of_the_whole():
    tensors = {"node_ids": np.array([5, 6, 7])}
    given = {"graph": "g", "fanouts": "2,2", "timeout": 5, "qos_target_us": 9, "split": "home"}
    request = decode_request(
        encode_request("gcn", tensors, request_id="r", parameters={**given, "priority": 1})
    )
    call = InferCall("gcn", "", {}, 0, client_id="r")
    found = decode_request(
        part_message(request, call, model_info(version="3"), np.array([6, 7]), 11)
    )
    assert (found.model, found.version, found.request_id) == ("gcn", "3", "r")
    assert found.parameters == {"graph": "g", "fanouts": "2,2", "priority": 1, "seed": 11}
    assert np.frombuffer(found.raws[0], np.int64).tolist() == [6, 7]


def test_only_what_was_passed_on_is_a_part():
    assert origin_of(b"", [(HOPS, "1"), (PART, "12")]).part_target_ns == 12
    assert origin_of(b"", [(PART, "12")]).part_target_ns == 0
    assert origin_of(b"", [(HOPS, "1"), (PART, "soon")]).part_target_ns == 0
    assert origin_of(b"", [(HOPS, "1"), (PART, "9" * 4000)]).part_target_ns <= 2**63 - 1
