"""A model compiled for real, once: through a server, and then looked at from near."""

import pytest
import torch

from bench.kit.servers import ServerProcess
from serve.client import Client
from serve.lane.executors import with_executor
from serve.lane.executors.check import disagreement
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.models.loader import load_model
from serve.models.repository import find
from serve.resources import configs_path
from tests.e2e.support import assert_equal, random_graph
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.slow
MODEL = "gat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def server(folder, request):
    # What the compiler finds out about the processor takes longer than compiling, and is kept.
    kept = request.config.cache.mkdir("gnnserve-inductor")
    models = {"load": [MODEL], "executor": "csr_compiled", "cache": str(folder / "cache")}
    with ServerProcess(
        folder,
        sections={"models": models},
        environment={"TORCHINDUCTOR_CACHE_DIR": str(kept)},
    ) as found:
        yield found


def test_a_server_compiles_a_model_and_serves_it(server, reference):
    with Client(server.target, timeout_s=PATIENCE_S) as client:
        for nodes, edges in ((60, 400), (1, 0), (2, 2), (3_000, 9_000)):
            graph = random_graph(nodes, edges, seed=nodes)
            answer = client.infer(MODEL, **graph.tensors)
            assert answer.qos.executor == "csr_compiled"
            assert_equal(answer.output, reference(MODEL, graph))


def test_a_package_from_near(server, folder):
    """Agrees everywhere, is used where it may be, borrows its weights, has exact memory."""
    from serve.lane.measure.memory import measure_memory

    spec = find(configs_path() / "models", MODEL)
    eager = load_model(spec)
    signature = probe_signature(eager)
    (package,) = (folder / "cache").glob("*.compiled")
    fast = with_executor(load_model(spec), "csr_compiled", signature, str(package))
    assert disagreement(eager, fast, signature) == ""

    forward, elsewhere = fast.module.forward, []
    before = forward._before
    forward._before = lambda *inputs: elsewhere.append(inputs) or before(*inputs)
    inputs = probe_graph(50, 200, Shape.PLAIN, spec.inputs, signature)
    fast.run(inputs)
    assert not elsewhere
    odd = (
        {"x": inputs["x"][:1], "edge_index": inputs["edge_index"][:, :2] * 0},
        {"edge_index": inputs["edge_index"][:, :1]},
        {"edge_index": inputs["edge_index"].int()},
        {"edge_index": inputs["edge_index"].t().contiguous().t()},
    )
    for change in odd:
        torch.testing.assert_close(fast.run(inputs | change), eager.run(inputs | change))
    assert len(elsewhere) == len(odd)

    own = dict(fast.module.named_parameters())
    for name, value in forward._weights.items():
        assert value.data_ptr() == own[name].data_ptr()
    memory = measure_memory(fast, signature, max_bytes=1 << 28)
    assert memory.warning == ""
    assert memory.error_low >= 0
