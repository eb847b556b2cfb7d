"""A run that is made again gives the answer that the first try would have given."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory

import grpc
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from serve.commands.configured import calibration_cache, device_of
from serve.config import ServerConfig, load_config
from serve.estimate.estimator import ModelEstimator
from serve.models.writer import write_model
from serve.native import front_lacks
from serve.obs.record import RequestRecord
from serve.rpc.server import GrpcServer
from serve.server.api import InferCall, Tensor
from serve.server.clock import now_ns
from serve.server.engine import Engine
from serve.server.regions import Regions
from serve.wire.messages import INFER_METHOD, decode_response, encode_request
from tests.e2e.support import Graph
from tests.processes import PATIENCE_S, wait_for
from tests.rpc.fakes import FACTS
from tests.server import changeling
from tests.server.test_engine import CONFIG, call
from tests.server.together import all_at_once

GRAPH_SECTION = """
[[graph]]
name = "own"
file = "own.npz"
"""
NODES, EDGES = 40, 160
#: Of all requests, in the order of their ends.
RECORDS: list[RequestRecord] = []
#: What ends the first try, and whether two requests are in it.
ENDS = [("die", False), ("overrun", False), ("die", True), ("overrun", True), ("fail", True)]


@pytest.fixture(scope="module")
def model(trouble):
    torch.manual_seed(1)
    module = changeling.build()
    folder = write_model(trouble.root, "changeling", module, factory="./model.py:build", args={})
    shutil.copy(changeling.__file__, folder / "model.py")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, trouble, model):
    folder = tmp_path_factory.mktemp("repeats")
    rng = np.random.default_rng(3)
    edges = rng.integers(0, NODES, (2, EDGES))
    x = rng.standard_normal((NODES, 4), dtype=np.float32)
    np.savez(folder / "own.npz", num_nodes=NODES, edge_index=edges, x=x)
    path = folder / "server.toml"
    path.write_text(CONFIG.format(repository=trouble.root) + GRAPH_SECTION)
    config = load_config(path)
    device = device_of(config)
    found = Engine(config, device, RECORDS.append, calibration_cache(config, device))
    found.start()
    found.open()
    found.wait_loaded()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def port(engine):
    """A native front in front of the engine."""
    if lacks := front_lacks():
        pytest.skip(lacks)
    config = ServerConfig(grpc_port=0, front="native")
    found = GrpcServer(engine, lambda: FACTS, lambda since_s: {}, config, engine.plain)
    found.port = found.start()
    yield found
    assert found.stop(PATIENCE_S) == 0
    wait_for(lambda: not engine.driver.requests.tickets(), "the end of all requests")
    assert engine._parts.shared.used_bytes == 0


def through(port, message):
    """Return the output that the port answers a message with."""
    with grpc.insecure_channel(f"127.0.0.1:{port.port}") as channel:
        answer = channel.unary_unary(INFER_METHOD)(message, timeout=PATIENCE_S)
    return decode_response(answer).outputs["output"]


def message_of(number, num_nodes=NODES):
    """The request of ``by_tensors`` as a message."""
    asked = by_tensors(number, num_nodes)
    dtypes = {"FP32": np.float32, "INT64": np.int64}
    tensors = {
        name: np.frombuffer(tensor.data, dtypes[tensor.datatype]).reshape(tensor.shape)
        for name, tensor in asked.tensors.items()
    }
    parameters = {"qos_target_us": PATIENT["qos_target_ns"] // 1000}
    return encode_request("changeling", tensors, parameters=parameters)


@pytest.mark.parametrize(("end", "merged"), ENDS)
def test_a_request_that_the_front_staged_answers_alike_at_every_try(
    engine, port, trouble, model, monkeypatch, end, merged
):
    entry = engine._catalogue.get("changeling")
    monkeypatch.setattr(entry, "signature", replace(entry.signature, mergeable=merged))
    union = ModelEstimator.union
    monkeypatch.setattr(ModelEstimator, "union", lambda *a: replace(union(*a), run_ns=1))
    numbers = (1, 2) if merged else (1,)
    expected = [engine.submit(by_tensors(number)).result().output for number in numbers]
    (model / end).touch()
    staged = port._front._front.counts()["plain"]
    with ThreadPoolExecutor(4) as threads:
        with trouble.holding() as held:
            first = threads.submit(engine.submit(call(held)).result)
            wait_for(trouble.running, "a running request")
            given = [threads.submit(through, port, message_of(number)) for number in numbers]
            wait_for(lambda: len(engine.driver.requests.tickets()) == 1 + len(numbers), "all")
        first.result(PATIENCE_S)
        for one, output in zip(given, expected, strict=True):
            np.testing.assert_array_equal(one.result(PATIENCE_S), output)
    assert not (model / end).exists()
    assert port._front._front.counts()["plain"] == staged + len(numbers)
    records = [record for record in RECORDS if record.model == "changeling"][-len(numbers) :]
    assert [record.attempt for record in records] == [2] * len(numbers)


def test_a_large_request_is_not_repeated_with_what_a_model_left_of_it(port, model):
    """Its message is not kept: either its inputs are as they were, or its client sends it again."""
    large = message_of(1, num_nodes=30_000)
    expected = through(port, large)
    (model / "die").touch()
    with pytest.raises(grpc.RpcError) as caught:
        through(port, large)
    assert not (model / "die").exists()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "has overwritten its inputs" in caught.value.details()
    np.testing.assert_array_equal(through(port, large), expected)


def test_a_staged_request_is_cancelled_with_its_call(engine, port, trouble, model):
    with (
        ThreadPoolExecutor(1) as threads,
        trouble.holding() as held,
        grpc.insecure_channel(f"127.0.0.1:{port.port}") as channel,
    ):
        first = threads.submit(engine.submit(call(held)).result)
        wait_for(trouble.running, "a running request")
        asked = channel.unary_unary(INFER_METHOD).future(message_of(1), timeout=PATIENCE_S)
        wait_for(lambda: len(engine.driver.requests.tickets()) == 2, "the second one")
        asked.cancel()
        wait_for(lambda: len(engine.driver.requests.tickets()) == 1, "its end")
    first.result(PATIENCE_S)
    wait_for(lambda: RECORDS and RECORDS[-1].reason == "" and port.in_flight == 0, "the last")
    assert [record.reason for record in RECORDS[-2:]] == ["cancelled", ""]


def test_a_model_that_was_retired_meanwhile_is_asked_by_message(engine, port, monkeypatch):
    output = through(port, message_of(1))
    counts = port._front._front.counts
    staged = counts()["plain"]
    monkeypatch.setattr(engine.plain, "_entries", {})
    np.testing.assert_array_equal(through(port, message_of(1)), output)
    assert counts()["plain"] == staged + 1


def by_tensors(number, num_nodes=NODES):
    rng = np.random.default_rng(number)
    x = rng.standard_normal((num_nodes, 4), dtype=np.float32)
    return call(Graph(x, rng.integers(0, num_nodes, (2, EDGES))), "changeling", **PATIENT)


def by_ids(number):
    ids = np.random.default_rng(number).integers(0, NODES, 12)
    tensors = {"node_ids": Tensor("INT64", ids.shape, ids.tobytes())}
    options = {"graph": "own", "fanouts": (5, 5), "seed": number, **PATIENT}
    return InferCall("changeling", "", tensors, arrived_ns=now_ns(), **options)


#: Nobody is late, so that on a busy machine too all may join a union.
PATIENT = {"qos_target_ns": int(PATIENCE_S * 1e9)}


@pytest.mark.parametrize("source", [by_tensors, by_ids])
@pytest.mark.parametrize(("end", "merged"), ENDS)
def test_a_model_that_works_in_place_answers_alike_at_every_try(
    engine, trouble, model, monkeypatch, source, end, merged
):
    entry = engine._catalogue.get("changeling")
    # A union of graphs that change is probed as none; each request's place must bear it all the
    # same. By estimate it takes next to no time, whatever was learned on a busy machine.
    monkeypatch.setattr(entry, "signature", replace(entry.signature, mergeable=merged))
    union = ModelEstimator.union
    monkeypatch.setattr(ModelEstimator, "union", lambda *a: replace(union(*a), run_ns=1))
    numbers = (1, 2) if merged else (1,)
    expected = [engine.submit(source(number)).result().output for number in numbers]
    (model / end).touch()
    given = all_at_once(engine, trouble, [source(number) for number in numbers])
    assert not (model / end).exists()
    for answer, output in zip(given, expected, strict=True):
        assert answer.record.attempt == 2
        np.testing.assert_array_equal(answer.output, output)


def test_members_of_a_union_are_not_harmed_by_one_another(engine, trouble, monkeypatch):
    entry = engine._catalogue.get("changeling")
    monkeypatch.setattr(entry, "signature", replace(entry.signature, mergeable=True))
    union = ModelEstimator.union
    monkeypatch.setattr(ModelEstimator, "union", lambda *a: replace(union(*a), run_ns=1))
    makers = (by_tensors, by_ids, by_tensors)
    expected = [engine.submit(make(number)).result().output for number, make in enumerate(makers)]
    given = all_at_once(engine, trouble, [make(number) for number, make in enumerate(makers)])
    assert [answer.record.merged for answer in given] == [3, 3, 3]
    for answer, output in zip(given, expected, strict=True):
        np.testing.assert_allclose(answer.output, output, rtol=1e-5, atol=1e-6)


def test_a_model_that_works_in_place_runs_as_pyg_wrote_it(engine):
    """Others answer other than it does on inputs that it changed, and are refused: above is all."""
    assert 'executor = "csr"' in CONFIG
    assert engine._catalogue.get("changeling").executor == "eager"


def test_a_clients_own_memory_is_never_written(engine, model):
    plain = by_tensors(1)
    expected = engine.submit(plain).result().output
    content = b"".join(bytes(tensor.data) for tensor in plain.tensors.values())
    regions = Regions()
    memory = SharedMemory(create=True, size=len(content))
    try:
        memory.buf[: len(content)] = content
        regions.register("r", memory.name, 0, len(content))
        tensors, start = {}, 0
        for name, tensor in plain.tensors.items():
            part = regions.part("r", start, len(tensor.data))
            tensors[name] = Tensor(tensor.datatype, tensor.shape, part)
            start += len(tensor.data)
        (model / "die").touch()
        asked = InferCall("changeling", "", tensors, arrived_ns=now_ns(), **PATIENT)
        answer = engine.submit(asked).result()
        assert answer.record.attempt == 2
        np.testing.assert_array_equal(answer.output, expected)
        assert bytes(memory.buf[: len(content)]) == content
    finally:
        regions.unregister("")
        memory.close()
        memory.unlink()
