"""Models loaded, replaced and let go while requests go on."""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
import torch
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from bench.kit.servers import ServerProcess
from serve.models.writer import write_model
from tests.e2e import mischief
from tests.e2e.support import (
    GOOD,
    REPOSITORY,
    Troubled,
    assert_answers,
    assert_equal,
    hanging_model,
    infer,
    raw_channel,
)
from tests.processes import descendants, metric, wait_for


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    return Troubled(tmp_path_factory.mktemp("repository"), "gcn")


@pytest.fixture(scope="module")
def changing(tmp_path_factory, trouble):
    with ServerProcess(tmp_path_factory.mktemp("changing"), repository=trouble.root) as found:
        yield found


@pytest.fixture
def call(changing):
    with raw_channel(changing) as found:
        yield found
    assert_answers(changing)
    wait_for(lambda: metric(changing, "gnnserve_memory_reserved_bytes") == 0, "an empty ledger")
    assert metric(changing, "gnnserve_lane_restarts_total") == 0


@pytest.fixture
def client(changing):
    with tritonclient.grpc.InferenceServerClient(changing.target) as found:
        yield found


def index(client, name):
    """(version, state, reason) of every version of `name`."""
    found = client.get_model_repository_index().models
    return [(model.version, model.state, model.reason) for model in found if model.name == name]


def code_of(call, model, graph):
    with pytest.raises(grpc.RpcError) as caught:
        infer(call, model, graph)
    return caught.value.code(), caught.value.details()


def test_unloaded_and_loaded_again(call, client, trouble):
    graph = trouble.graph()
    before = infer(call, "mischief", graph).outputs["output"]
    for _ in "once", "and once more":
        client.unload_model("mischief")
        assert index(client, "mischief") == [("1", "UNAVAILABLE", "unloaded")]
    assert not client.is_model_ready("mischief")
    assert code_of(call, "mischief", graph) == (
        grpc.StatusCode.UNAVAILABLE,
        "model 'mischief' is UNAVAILABLE: unloaded",
    )
    infer(call, "gcn", GOOD)
    for _ in "once", "and once more":
        client.load_model("mischief")
        assert [row[:2] for row in index(client, "mischief")] == [("1", "READY")]
    assert client.is_model_ready("mischief")
    assert_equal(infer(call, "mischief", graph).outputs["output"], before)


def test_unloading_waits_for_what_was_accepted(call, client, trouble):
    with ThreadPoolExecutor(5) as threads:
        with trouble.holding() as graph:
            accepted = [threads.submit(infer, call, "mischief", graph) for _ in range(4)]
            wait_for(lambda: len(trouble.running()) == 2, "two running requests")
            leaving = threads.submit(client.unload_model, "mischief")
            wait_for(lambda: not client.is_model_ready("mischief"), "the unloading")
            code, _ = code_of(call, "mischief", graph)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert not leaving.done()
            assert [row[1] for row in index(client, "mischief")] == ["UNLOADING"]
        for one in accepted:
            assert_equal(one.result().outputs["output"], trouble.expected(graph))
        leaving.result()
    client.load_model("mischief")


@contextmanager
def asking(call, graph, readers=4) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Clients that ask without a pause; when each asked, and its answer. None may fail."""
    answers: list[tuple[int, np.ndarray]] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            asked_ns = time.monotonic_ns()
            answers.append((asked_ns, infer(call, "mischief", graph).outputs["output"]))

    with ThreadPoolExecutor(readers) as threads:
        asked = [threads.submit(ask) for _ in range(readers)]
        try:
            yield answers
        finally:
            stop.set()
        for one in asked:
            one.result()


def test_changed_weights_take_over_without_a_gap(call, client, trouble):
    graph = trouble.graph(num_nodes=20)
    old = trouble.expected(graph)
    torch.manual_seed(1)
    trouble.module = mischief.build()
    new = trouble.expected(graph)
    assert np.abs(new - old).max() > 0.1
    with asking(call, graph) as answers:
        wait_for(lambda: len(answers) > 20, "answers of the old weights")
        write_model(trouble.root, "mischief", trouble.module, factory="./model.py:build", args={})
        assert_equal(infer(call, "mischief", graph).outputs["output"], old)
        client.load_model("mischief")
        loaded, loaded_ns = len(answers), time.monotonic_ns()
        assert_equal(infer(call, "mischief", graph).outputs["output"], new)
        wait_for(lambda: len(answers) > loaded + 20, "answers of the new weights")
    for asked_ns, answer in answers:
        # Whoever asked before the change is answered by what was served then.
        if asked_ns > loaded_ns:
            assert_equal(answer, new)
        else:
            assert min(np.abs(answer - old).max(), np.abs(answer - new).max()) < 1e-4


def test_versions_are_served_once_loaded(call, client, trouble):
    graph = trouble.graph()
    shutil.copytree(trouble.folder / "1", trouble.folder / "2")
    try:
        assert index(client, "mischief")[1] == ("2", "UNAVAILABLE", "not loaded")
        assert infer(call, "mischief", graph).version == "1"
        client.load_model("mischief")
        assert [row[:2] for row in index(client, "mischief")] == [("1", "READY"), ("2", "READY")]
        assert client.get_model_metadata("mischief").versions == ["1", "2"]
        answer = infer(call, "mischief", graph)
        assert answer.version == "2"
        assert_equal(answer.outputs["output"], trouble.expected(graph))
    finally:
        shutil.rmtree(trouble.folder / "2")
    client.load_model("mischief")
    assert infer(call, "mischief", graph).version == "1"
    with pytest.raises(InferenceServerException, match="has no version '2'"):
        client.get_model_metadata("mischief", "2")


def test_a_model_that_raises_when_loaded_leaves_the_old_one_serving(call, client, trouble):
    graph = trouble.graph()
    code = trouble.folder / "model.py"
    good = code.read_text()
    code.write_text(good + "\nraise RuntimeError('no such luck')\n")
    try:
        with pytest.raises(InferenceServerException, match="no such luck") as caught:
            client.load_model("mischief")
        assert caught.value.status() == "StatusCode.INTERNAL"
        assert_equal(infer(call, "mischief", graph).outputs["output"], trouble.expected(graph))
        assert [row[1] for row in index(client, "mischief")] == ["READY"]
    finally:
        code.write_text(good)


def test_a_model_that_ends_the_process_when_loaded(call, client, trouble):
    folder = trouble.root / "deadly"
    shutil.copytree(trouble.folder, folder)
    (folder / "model.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(InferenceServerException, match="died") as caught:
        client.load_model("deadly")
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert [row[1] for row in index(client, "deadly")] == ["UNAVAILABLE"]
    shutil.rmtree(folder)


def test_models_come_and_go_on_disk(call, client, trouble):
    with pytest.raises(InferenceServerException, match="unknown model 'sage'") as caught:
        client.load_model("sage")
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    shutil.copytree(REPOSITORY / "sage", trouble.root / "sage")
    assert index(client, "sage") == [("1", "UNAVAILABLE", "not loaded")]
    client.load_model("sage")
    assert infer(call, "sage", GOOD).outputs["output"].shape == (30, 5)
    # What is loaded is served until it is unloaded, whatever becomes of the files.
    shutil.rmtree(trouble.root / "sage")
    assert infer(call, "sage", GOOD).outputs["output"].shape == (30, 5)
    client.unload_model("sage")
    code, words = code_of(call, "sage", GOOD)
    assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE), words
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("sage")
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    code, words = code_of(call, "sage", GOOD)
    assert code is grpc.StatusCode.NOT_FOUND, words


def test_a_load_that_hangs_keeps_no_other_waiting_and_ends_with_its_client(
    call, client, changing, trouble
):
    hanging_model(trouble.root)
    shutil.copytree(REPOSITORY / "gcn", trouble.root / "beside")
    before = set(descendants(changing.pid))
    with grpc.insecure_channel(changing.target) as load:
        begin = load.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
        hangs = begin.future(b"\x12\x05hangs")  # one field, the model's name
        wait_for(lambda: "hangs:1: calibrating" in changing.log.read_text(), "the load")
        loading = wait_for(lambda: set(descendants(changing.pid)) - before, "its process")
        client.load_model("beside")
        infer(call, "beside", GOOD)
        client.unload_model("beside")
        assert not hangs.done()
        hangs.cancel()
        wait_for(lambda: loading.isdisjoint(descendants(changing.pid)), "the end of its process")
    wait_for(
        lambda: "cancelled by its client" in index(client, "hangs")[0][2], "the reason that is told"
    )
    for name in ("hangs", "beside"):
        shutil.rmtree(trouble.root / name)


def test_a_client_is_not_told_where_the_repository_lies(client, changing, trouble):
    shutil.copytree(REPOSITORY / "gcn", trouble.root / "broken")
    (trouble.root / "broken" / "config.toml").write_text("[model\n")
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("broken")
    ((_, _, reason),) = index(client, "broken")
    for text in (caught.value.message(), reason):
        assert "broken/config.toml" in text
        assert str(trouble.root) not in text
    assert f"{trouble.root}/broken/config.toml" in changing.log.read_text()
    shutil.rmtree(trouble.root / "broken")
