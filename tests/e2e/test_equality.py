"""The server's answers are those of PyG called directly, whichever client asks and however many."""

import asyncio
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc
from torch_geometric.data import Data
from tritonclient.utils import shared_memory

from bench.kit.servers import ServerProcess
from serve.client import AsyncClient, Client
from serve.graphs.datasets import load_dataset
from serve.graphs.subgraphs import subgraphs
from serve.models.community import community_graph
from tests.e2e.support import GOOD, MODELS, Graph, assert_equal, infer, random_graph, raw_channel
from tests.processes import PATIENCE_S, wait_for


def _community() -> Graph:
    graph = community_graph()
    return Graph(graph.x, graph.edge_index)


def _with_edges(num_nodes: int, edges: list[tuple[int, int]]) -> Graph:
    return Graph(random_graph(num_nodes, 0, seed=3).x, np.array(edges, np.int64).T.copy())


GRAPHS = {
    "community": _community(),
    "empty": random_graph(0, 0),
    "one node": random_graph(1, 0),
    "one node, itself": _with_edges(1, [(0, 0)]),
    "no edges": random_graph(50, 0),
    "self-loops": _with_edges(4, [(0, 0), (1, 1), (2, 3), (3, 3)]),
    "duplicate edges": _with_edges(4, [(0, 1), (0, 1), (0, 1), (1, 0), (2, 3)]),
    "int32": random_graph(200, 1_500, seed=1, dtype=np.int32),
    "int64": random_graph(200, 1_500, seed=2, dtype=np.int64),
    "many edges": random_graph(300, 20_000, seed=4),
    "large": random_graph(6_000, 30_000, seed=5),
}


def _by_triton(server: ServerProcess, model: str, graph: Graph) -> np.ndarray:
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        inputs = []
        for name, array in graph.tensors.items():
            datatype = {"float32": "FP32", "int32": "INT32", "int64": "INT64"}[array.dtype.name]
            tensor = tritonclient.grpc.InferInput(name, array.shape, datatype)
            inputs.append(tensor.set_data_from_numpy(array))
        return client.infer(model, inputs).as_numpy("output")


def _by_client(server: ServerProcess, model: str, graph: Graph) -> np.ndarray:
    data = Data(x=torch.from_numpy(graph.x), edge_index=torch.from_numpy(graph.edge_index))
    with Client(server.target, timeout_s=PATIENCE_S) as client:
        return client.infer(model, data).output


def _by_async_client(server: ServerProcess, model: str, graph: Graph) -> np.ndarray:
    async def ask() -> np.ndarray:
        async with AsyncClient(server.target, timeout_s=PATIENCE_S) as client:
            return (await client.infer(model, **graph.tensors)).output

    return asyncio.run(ask())


def _by_triton_in_shared_memory(server: ServerProcess, model: str, graph: Graph) -> np.ndarray:
    """Inputs and output in one region; an empty tensor has no place there."""
    names = {"float32": "FP32", "int32": "INT32", "int64": "INT64"}
    output_bytes = 4 * 5 * len(graph.x)
    size = sum(array.nbytes for array in graph.tensors.values()) + output_bytes + 1
    key = f"gnnserve-test-{uuid.uuid4().hex}"
    region = shared_memory.create_shared_memory_region(key, key, size)
    try:
        with tritonclient.grpc.InferenceServerClient(server.target) as client:
            client.register_system_shared_memory(key, key, size)
            inputs, offset = [], 0
            for name, array in graph.tensors.items():
                tensor = tritonclient.grpc.InferInput(name, array.shape, names[array.dtype.name])
                shared_memory.set_shared_memory_region(region, [array], offset)
                inputs.append(tensor.set_shared_memory(key, array.nbytes, offset))
                offset += array.nbytes
            output = tritonclient.grpc.InferRequestedOutput("output")
            output.set_shared_memory(key, output_bytes, offset)
            shape = client.infer(model, inputs, outputs=[output]).get_output("output").shape
            found = shared_memory.get_contents_as_numpy(region, np.float32, list(shape), offset)
            client.unregister_system_shared_memory(key)
            return found.copy()
    finally:
        shared_memory.destroy_shared_memory_region(region)


CLIENTS = {
    "tritonclient": _by_triton,
    "tritonclient, shared memory": _by_triton_in_shared_memory,
    "sync": _by_client,
    "async": _by_async_client,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("ask", CLIENTS.values(), ids=CLIENTS)
def test_every_client_gets_what_pyg_gives(server, reference, ask, graph, model):
    assert_equal(ask(server, model, graph), reference(model, graph))


@pytest.mark.parametrize("model", MODELS)
def test_answers_on_real_graphs(server, reference, call, model):
    folder = os.environ.get("GNNSERVE_DATA")
    if folder is None:
        pytest.skip("GNNSERVE_DATA does not name a folder of real graphs")
    cora = load_dataset("cora", folder=Path(folder))
    for cut in subgraphs(cora, 5, seed=0, min_nodes=50, max_nodes=2_000, max_edges=20_000):
        x = random_graph(cut.num_nodes, 0, seed=cut.index).x
        graph = Graph(x, np.ascontiguousarray(cut.edge_index))
        assert_equal(infer(call, model, graph).outputs["output"], reference(model, graph))


@pytest.mark.parametrize("model", MODELS)
def test_models_know_the_communities(call, model):
    graph = community_graph()
    scores = infer(call, model, GRAPHS["community"]).outputs["output"]
    right = (scores.argmax(axis=1) == graph.y)[graph.test_mask].mean()
    # Chance is 0.2; the features without the edges give about a half.
    assert right > 0.9


@pytest.mark.parametrize(("policy", "discipline"), [("fifo", "barrier"), ("slack", "preemptive")])
def test_requests_at_once_get_their_own_answers(tmp_path, reference, policy, discipline):
    with (
        ServerProcess(tmp_path, policy=policy, discipline=discipline) as server,
        raw_channel(server) as call,
    ):
        ask_at_once(call, reference, policy, discipline)


def test_requests_at_once_get_their_own_answers_while_lanes_roll(call, reference):
    ask_at_once(call, reference, "sqtf", "rolling")


def ask_at_once(call, reference, policy, discipline):
    """Sizes are mixed, so that answers are overtaken; a swapped one would have another shape."""
    asked = [
        (MODELS[number % 4], random_graph(20 + 37 * number % 900, 11 * number, seed=number))
        for number in range(96)
    ]

    def they_meet():
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda one: infer(call, *one), asked))
        for (model, graph), answer in zip(asked, answers, strict=True):
            assert_equal(answer.outputs["output"], reference(model, graph))
            assert (answer.model, answer.parameters["policy"]) == (model, policy)
            assert answer.parameters["discipline"] == discipline
        uids = {answer.parameters["request_uid"] for answer in answers}
        assert len(uids) == len(asked)
        in_groups = any(answer.parameters["group_size"] > 1 for answer in answers)
        return in_groups and len({answer.parameters["lane"] for answer in answers}) > 1

    # A machine that keeps the clients from asking at once answers one after the other.
    wait_for(they_meet, "requests that run side by side")


def test_typed_contents_are_taken_like_raw_ones(server, reference):
    """A client may give numbers instead of bytes; then no tensor may be raw."""
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        pb = tritonclient.grpc.service_pb2
        request = pb.ModelInferRequest(model_name="gcn")
        x = request.inputs.add(name="x", datatype="FP32", shape=GOOD.x.shape)
        x.contents.fp32_contents.extend(GOOD.x.ravel().tolist())
        edges = request.inputs.add(name="edge_index", datatype="INT64", shape=GOOD.edge_index.shape)
        edges.contents.int64_contents.extend(GOOD.edge_index.ravel().tolist())
        answer = client._client_stub.ModelInfer(request)
    found = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(30, 5)
    assert_equal(found, reference("gcn", GOOD))
