"""Requests that a server sends itself at start, and what it learns from them."""

import logging
from types import SimpleNamespace

import pytest

from serve.errors import NotReady
from serve.estimate.estimator import ModelEstimator, Overhead
from serve.obs.record import RequestRecord
from serve.server.learning import alone as module
from serve.server.learning.alone import LoneRequests
from tests.estimate.conftest import SIGNATURE, calibration

__all__ = ["calibration"]

BASE_NS, NS_PER_KIB = 700_000, 500


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(module, "IDLE_NS", 0)


@pytest.fixture
def world(calibration):
    return World(calibration)


class World:
    """Two models on a server that adds `BASE_NS` and `NS_PER_KIB` to what their runs take."""

    def __init__(self, calibration):
        self.overhead = Overhead(1, 1)
        self.entries = {name: self.entry(name, calibration) for name in ("quick", "slow")}
        #: (model, nodes) of every request.
        self.asked = []
        self.refused = None
        self.alone = True
        self.slower = {"quick": 1.0, "slow": 1.5}

    def entry(self, name, calibration):
        return SimpleNamespace(
            key=f"{name}:1",
            spec=SimpleNamespace(name=name, inputs=("x", "edge_index"), interface=None),
            signature=SIGNATURE,
            estimator=ModelEstimator(calibration, self.overhead),
        )

    def ask(self, model, tensors):
        num_nodes, num_edges = len(tensors["x"]), tensors["edge_index"].shape[1]
        self.asked.append((model, num_nodes))
        if (model, num_nodes) == self.refused:
            raise NotReady("UNAVAILABLE: not today")
        return RequestRecord(
            request_uid="u",
            client_id="c",
            model=model,
            version="1",
            arrived_unix_ns=0,
            status="OK",
            attempt=1,
            alone=self.alone,
            run_ns=self.runs_ns(model, num_nodes, num_edges),
            latency_ns=self.takes_ns(model, num_nodes, num_edges),
        )

    def runs_ns(self, model, num_nodes, num_edges):
        fitted_ns = self.entries[model].estimator.fitted_ns(num_nodes, num_edges)
        return int(fitted_ns * self.slower[model])

    def takes_ns(self, model, num_nodes, num_edges):
        input_kib = (128 * num_nodes + 16 * num_edges) / 1024
        beyond_ns = BASE_NS + NS_PER_KIB * input_kib
        return int(self.runs_ns(model, num_nodes, num_edges) + beyond_ns)

    def learn(self, largest_bytes=1 << 30):
        lone = LoneRequests(list(self.entries.values()), self.ask, largest_bytes)
        for times in (1, 2):
            lone.send(times)
        lone.teach(self.overhead)


def test_promised_times_equal_those_of_lone_requests(world):
    world.learn()
    assert world.overhead.base_ns == pytest.approx(BASE_NS, rel=0.02)
    assert world.overhead.ns_per_kib == pytest.approx(NS_PER_KIB, rel=0.02)
    for model, entry in world.entries.items():
        for size in ((16, 160), (300, 900), (5_000, 50_000)):
            estimate = entry.estimator.estimate(*size)
            assert estimate.solo_ns == pytest.approx(world.takes_ns(model, *size), rel=0.05)
            assert estimate.run_ns == pytest.approx(world.runs_ns(model, *size), rel=0.02)


def test_models_take_turns_from_small_to_large(world):
    world.learn()
    turn = [(model, nodes) for nodes in module.PROBE_NODES for model in ("quick", "slow")]
    assert world.asked == turn * 3


def test_no_run_but_those_of_the_smallest_graphs_is_long(world, monkeypatch):
    slow = world.entries["slow"].estimator
    monkeypatch.setattr(slow, "run_ns", lambda nodes, edges: nodes * module._LONGEST_NS // 1024)
    world.learn()
    assert {nodes for model, nodes in world.asked if model == "slow"} == {16, 1024}
    monkeypatch.setattr(slow, "run_ns", lambda nodes, edges: 2 * module._LONGEST_NS)
    world.asked.clear()
    world.learn()
    assert {nodes for model, nodes in world.asked if model == "slow"} == {16}


def test_after_its_time_it_begins_no_request_and_what_it_has_teaches(world, monkeypatch):
    now = iter(range(0, 1 << 62, module.SEND_NS // 4))
    monkeypatch.setattr(module.clock, "now_ns", lambda: next(now))
    world.learn()
    assert world.asked == [("quick", 16), ("slow", 16), ("quick", 1024), ("slow", 1024)] * 2
    assert world.overhead.base_ns == pytest.approx(BASE_NS, rel=0.02)


def test_no_request_is_larger_than_the_server_takes(world):
    limit_bytes = 1 << 20
    world.learn(limit_bytes)
    most = max(nodes for _, nodes in world.asked)
    assert 1024 < most < 8192
    assert (limit_bytes * 0.99) < (128 + 160) * most <= limit_bytes


def test_a_request_without_answer_is_logged_and_left_out(world, caplog):
    world.refused = ("slow", 8192)
    with caplog.at_level(logging.WARNING):
        world.learn()
    assert world.asked.count(world.refused) == 1
    assert "slow:1 is not timed on 8192 nodes and 81920 edges: UNAVAILABLE" in caplog.text
    assert world.overhead.base_ns == pytest.approx(BASE_NS, rel=0.02)


def test_requests_that_were_not_alone_teach_nothing(world):
    world.alone = False
    world.learn()
    assert (world.overhead.base_ns, world.overhead.ns_per_kib) == (1, 1)
