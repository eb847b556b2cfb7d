"""Requests side by side at start, which teach how much runs slow one another."""

import threading
from types import SimpleNamespace

import pytest

from bench.kit.waiting import PATIENCE_S
from serve.errors import ModelError
from serve.server.learning.beside import DeviceRoom, is_news, learn_interference

#: Reserved for each node of a probe.
NODE_BYTES = 1000


class Server:
    """Answers when as many requests are there as are expected at once."""

    def __init__(self, at_once):
        self.sizes = []
        self._arrived = threading.Barrier(at_once)

    def submit(self, call):
        self.sizes.append((call.model, call.tensors["x"].shape[0]))
        assert call.qos_target_ns >= 10**12
        self._arrived.wait(PATIENCE_S)
        return SimpleNamespace(result=lambda: None)


def entry(name, node_ns=1):
    estimator = SimpleNamespace(
        estimate=lambda nodes, edges: SimpleNamespace(
            reserve_bytes=NODE_BYTES * nodes, run_ns=node_ns * nodes
        )
    )
    spec = SimpleNamespace(name=name, inputs=("x", "edge_index"), interface=None)
    return SimpleNamespace(spec=spec, signature=SIGNATURE, estimator=estimator)


SIGNATURE = SimpleNamespace(num_features=2, edge_dim=None)


@pytest.mark.parametrize(
    ("devices", "budget", "node_ns", "nodes"),
    [(1, 10**8, 1, 8192), (2, 10**7, 1, 1024), (1, 10**8, 10_000, 1024), (1, 10**8, 10**7, 16)],
)
def test_as_many_at_once_as_there_are_slots_and_room(devices, budget, node_ns, nodes):
    server = Server(2 * devices)
    entries = [entry("gcn", node_ns), entry("gat", node_ns)]
    learn_interference(entries, server.submit, DeviceRoom(2, budget, devices))
    assert set(server.sizes) == {("gcn", nodes), ("gat", nodes)}


def test_nothing_is_sent_where_runs_never_meet_or_nothing_fits():
    def submit(call):
        raise AssertionError(call)

    learn_interference([entry("gcn")], submit, DeviceRoom(1, 10**9))
    learn_interference([entry("gcn")], submit, DeviceRoom(4, NODE_BYTES))
    learn_interference([], submit, DeviceRoom(4, 10**9))


def test_a_request_that_fails_does_not_keep_the_server_from_starting(caplog):
    def submit(call):
        raise ModelError("it does not like the probe")

    learn_interference([entry("gcn")], submit, DeviceRoom(2, 10**9))
    assert "model gcn beside others: it does not like the probe" in caplog.text


def test_small_changes_of_the_slowdown_are_no_news():
    assert is_news((1.0, 1.5), (1.0,))
    assert is_news((1.0, 1.5), (1.0, 1.4))
    assert not is_news((1.0, 1.5), (1.0, 1.48))
