"""Joint requests in an engine: as separate ones answer, their inputs staged once, ends apart."""

import shutil
import threading
import time

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from bench.kit import gallery
from serve.commands.configured import calibration_cache, device_of
from serve.config import load_config
from serve.errors import InvalidInput, ModelError, NotReady, RequestCancelled, TooBig, UnknownName
from serve.models.writer import write_model
from serve.server.api import InferResult, Tensor
from serve.server.engine import Engine
from serve.server.learning.alone import call_of
from tests.e2e.mischief import HOLD, RAISE
from tests.e2e.support import Troubled, random_graph
from tests.processes import PATIENCE_S, wait_for
from tests.server import changeling
from tests.server.test_engine import CONFIG, call

SHIPPED = ("gcn", "sage", "gat")
GRAPH = """
[[graph]]
name = "community"
dataset = "community"
"""


@pytest.fixture(scope="module")
def jokers(tmp_path_factory):
    """Shipped models, one that misbehaves, one that works in place, and one that declares."""
    found = Troubled(tmp_path_factory.mktemp("repository"), *SHIPPED)
    torch.manual_seed(1)
    folder = write_model(
        found.root, "changeling", changeling.build(), factory="./model.py:build", args={}
    )
    shutil.copy(changeling.__file__, folder / "model.py")
    found.attention = gallery.write(found.root, "attention")
    return found


@pytest.fixture(scope="module")
def records():
    return []


@pytest.fixture(scope="module")
def started(tmp_path_factory, jokers, records):
    path = tmp_path_factory.mktemp("joint") / "server.toml"
    text = CONFIG.replace("max_queue = 4", "max_queue = 9").replace("lanes = 1", "lanes = 2")
    path.write_text(text.format(repository=jokers.root) + GRAPH)
    config = load_config(path)
    device = device_of(config)
    found = Engine(config, device, records.append, calibration_cache(config, device))
    found.start()
    found.open()
    found.wait_loaded()
    yield found
    found.stop()


@pytest.fixture
def engine(started, records):
    """Afterwards nothing is staged, reserved or waiting."""
    records.clear()
    yield started
    wait_for(lambda: started._parts.shared.used_bytes == 0, "an empty shared pool")
    snapshot = started.snapshot()
    assert (snapshot.reserved_bytes, snapshot.pending) == (0, {})
    assert not started.driver.requests.tickets()


def calls(graph, *models, **options):
    return [call(graph, model, **options) for model in models]


def outputs(results):
    return [result.output for result in results]


def separately(engine, made):
    return outputs(
        engine.submit(replace(one, arrived_ns=time.monotonic_ns())).result() for one in made
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("nodes", "edges"), [(1, 1), (37, 160), (1500, 9000)])
def test_answers_are_those_of_separate_requests_bit_for_bit(engine, records, nodes, edges, dtype):
    made = calls(random_graph(nodes, edges, seed=nodes, dtype=dtype), *SHIPPED)
    expected = separately(engine, made)
    records.clear()
    ticket = engine.submit_jointly(made)
    results = ticket.results()
    for found, wanted in zip(outputs(results), expected, strict=True):
        assert found.tobytes() == wanted.tobytes()
    assert [record.model for record in sorted(records, key=lambda r: SHIPPED.index(r.model))] == [
        *SHIPPED
    ]
    assert {record.joint_uid for record in records} == {ticket.joint_uid}
    assert len({record.request_uid for record in records}) == 3
    estimates = {result.record.solo_estimate_ns for result in results}
    assert len(estimates) == 3, "each has an estimate of its own"
    assert all(result.record.qos_target_ns > 0 for result in results)


def test_a_graph_is_staged_and_counted_once(engine, jokers):
    graph = random_graph(4000, 40_000, seed=2)
    made = calls(graph, *SHIPPED)
    with jokers.holding() as held:
        blockers = [engine.submit(call(held)) for _ in range(2)]
        threads = [threading.Thread(target=one.result) for one in blockers]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(jokers.running()) == 2, "both lanes in use")
        before = engine._parts.shared.used_bytes
        ticket = engine.submit_jointly(made)
        found = []
        thread = threading.Thread(target=lambda: found.extend(ticket.results()))
        thread.start()
        pool = engine._parts.shared
        wait_for(lambda: all(m.inputs.staged for m in ticket.members), "staged inputs")
        took = pool.used_bytes - before
        rest = sum(member.inputs.output_capacity_bytes for member in ticket.members)
        tasks = [member.task for member in ticket.members]
    for one in (*threads, thread):
        one.join(PATIENCE_S)
    sent = graph.x.nbytes + graph.edge_index.nbytes
    assert sent + rest <= took <= sent + rest + 4096
    assert all(isinstance(one, InferResult) for one in found)
    (block,) = {task.block for task in tasks}
    assert block.size_bytes == pytest.approx(sent, abs=256)


def test_models_that_work_in_place_change_nothing_for_others(engine, jokers):
    graph = jokers.graph(num_nodes=300)
    made = calls(graph, "mischief", "changeling")
    expected = separately(engine, made)
    expected = [expected[1], expected[0], expected[1]]
    for _ in range(5):
        found = outputs(engine.submit_jointly([made[1], made[0], made[1]]).results())
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]


@pytest.mark.parametrize("end", ["die", "overrun"])
def test_a_run_that_is_repeated_finds_the_inputs_as_sent(engine, jokers, end):
    graph = jokers.graph(num_nodes=300)
    made = calls(graph, "changeling", "mischief")
    expected = separately(engine, made)
    (jokers.root / "changeling" / end).touch()
    results = engine.submit_jointly(made).results()
    assert results[0].record.attempt == 2
    for found, wanted in zip(outputs(results), expected, strict=True):
        assert found.tobytes() == wanted.tobytes()
    wait_for(lambda: engine.snapshot().lanes_up == 2, "both lanes")


def test_one_failure_leaves_the_others_answers(engine, jokers, records):
    graph = jokers.graph(RAISE, num_nodes=20)
    expected = separately(engine, calls(graph, "changeling"))
    records.clear()
    failed, kept = engine.submit_jointly(calls(graph, "mischief", "changeling")).results()
    assert isinstance(failed, ModelError)
    assert "asked to fail" in str(failed)
    assert kept.output.tobytes() == expected[0].tobytes()
    assert {record.model: record.reason for record in records} == {
        "mischief": "model_error",
        "changeling": "",
    }


def test_what_is_wrong_with_a_shared_tensor_is_told_of_all(engine):
    graph = random_graph(10, 20)
    graph.edge_index[1, 3] = 10
    found = engine.submit_jointly(calls(graph, *SHIPPED)).results()
    assert {type(one) for one in found} == {InvalidInput}
    assert {str(one) for one in found} == {
        "input 'edge_index' [1, 3] is 10; it must be in [0, 10), the rows of 'x'"
    }


def test_cancelling_ends_all(engine, jokers):
    graph = jokers.graph(HOLD)
    with jokers.holding():
        ticket = engine.submit_jointly(calls(graph, "mischief", "changeling", "mischief"))
        found = []
        thread = threading.Thread(target=lambda: found.extend(ticket.results()))
        thread.start()
        wait_for(jokers.running, "a run")
        ticket.cancel()
        thread.join(PATIENCE_S)
    assert [type(one) for one in found if isinstance(one, Exception)].count(RequestCancelled) >= 2


def test_a_refusal_names_the_model_and_leaves_nothing(engine, records, monkeypatch):
    entry = engine._catalogue.get("sage")
    estimate = entry.estimator.estimate

    def huge(*sizes, **options):
        found = estimate(*sizes, **options)
        return replace(found, peak_bytes=1 << 40, reserve_bytes=1 << 40)

    monkeypatch.setattr(entry.estimator, "estimate", huge)
    found = engine.submit_jointly(calls(random_graph(10, 20), *SHIPPED)).results()
    assert {type(one) for one in found} == {TooBig}
    assert {str(one).partition(" bytes")[0] for one in found} == {f"model sage:1: needs {1 << 40}"}
    assert {record.model for record in records} == set(SHIPPED)
    with pytest.raises(UnknownName, match="'nope'"):
        engine.submit_jointly(calls(random_graph(3, 3), "gcn", "nope"))


def test_models_that_declare_share_what_they_take_alike(engine, jokers):
    declared = call_of("attention", gallery.request(jokers.attention, (30, 90), seed=3))
    alone = engine.submit(declared).result()
    ticket = engine.submit_jointly([declared, declared])
    first, second = (member.inputs for member in ticket.members)
    assert first.layout.inputs == second.layout.inputs
    for result in ticket.results():
        assert result.outputs.keys() == alone.outputs.keys()
        for name, wanted in alone.outputs.items():
            assert result.outputs[name].tobytes() == wanted.tobytes()


def test_nodes_of_a_resident_graph_are_sampled_for_each_model(engine):
    ids = Tensor("INT64", (3,), np.array([5, 17, 1999]).tobytes())
    made = [
        replace(one, tensors={"node_ids": ids}, graph="community", seed=7)
        for one in calls(random_graph(3, 3), *SHIPPED)
    ]
    expected = separately(engine, made)
    for found, wanted in zip(outputs(engine.submit_jointly(made).results()), expected, strict=True):
        assert found.tobytes() == wanted.tobytes()


def test_none_is_taken_before_the_server_serves(engine, monkeypatch):
    monkeypatch.setattr(engine._records, "serving", False)
    with pytest.raises(NotReady, match="starting"):
        engine.submit_jointly(calls(random_graph(3, 3), *SHIPPED))
