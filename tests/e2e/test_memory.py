"""A model that takes more memory than anybody could know: only its own request notices."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch

from bench.kit.servers import ServerProcess
from serve.models.writer import write_model
from tests.e2e import liar
from tests.e2e.support import (
    REPOSITORY,
    Graph,
    assert_equal,
    infer,
    random_graph,
    raw_channel,
)
from tests.processes import descendants, metric, row, wait_for

BUDGET_MIB = 512
NEIGHBOURS = ("gcn", "gat")


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return liar.build()


@pytest.fixture(scope="module")
def server(tmp_path_factory, module):
    root = tmp_path_factory.mktemp("repository") / "models"
    for name in NEIGHBOURS:
        shutil.copytree(REPOSITORY / name, root / name)
    folder = write_model(root, "liar", module, factory="./model.py:build", args={})
    shutil.copy(liar.__file__, folder / "model.py")
    sections = {
        "device": {"lanes": 2, "memory_budget": f"{BUDGET_MIB} MiB"},
        # What drops loops before it makes messages is PyG's own code.
        "models": {"executor": "eager"},
    }
    with ServerProcess(tmp_path_factory.mktemp("lied"), repository=root, sections=sections) as it:
        yield it


@pytest.fixture
def call(server):
    with raw_channel(server) as found:
        yield found


@pytest.fixture
def neighbours(server, call, reference):
    """Other models' requests go on all the time: all answered, by the same lanes, rightly."""
    processes = descendants(server.pid)
    graphs = [random_graph(40 + n, 200, seed=n) for n in range(60)]

    def ask(number):
        model = NEIGHBOURS[number % 2]
        return infer(call, model, graphs[number]).outputs["output"], reference(
            model, graphs[number]
        )

    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(ask, range(len(graphs)))
        yield
        for found, expected in answers:
            assert_equal(found, expected)
    assert descendants(server.pid).keys() <= processes.keys()
    assert metric(server, "gnnserve_lane_restarts_total") == 0
    wait_for(lambda: metric(server, "gnnserve_memory_reserved_bytes") == 0, "empty ledger")


def lie(mib, num_nodes=3):
    x = np.random.default_rng(num_nodes).standard_normal((num_nodes, 4), dtype=np.float32)
    x[0, 0] = mib
    return Graph(x, np.zeros((2, 0), np.int64))


@pytest.mark.parametrize("model", NEIGHBOURS)
def test_self_loops_that_a_model_drops_are_not_reserved_for(server, call, reference, model):
    plain = random_graph(1_000, 8_000, seed=1)
    plain.edge_index[1] = (plain.edge_index[0] + 1) % 1_000
    loops = Graph(plain.x, plain.edge_index.copy())
    loops.edge_index[1, :6_000] = loops.edge_index[0, :6_000]
    taken = []
    for graph, tenant in ((plain, "plain"), (loops, "loops")):
        found = infer(call, model, graph, tenant=f"{tenant} {model}").outputs["output"]
        assert_equal(found, reference(model, graph))
        taken.append(row(server, "tenant = ?", f"{tenant} {model}"))
        measured, estimate = taken[-1]["pmc_measured_bytes"], taken[-1]["pmc_estimate_bytes"]
        assert estimate == pytest.approx(measured, rel=0.01)
        assert measured <= taken[-1]["reserve_bytes"]
        assert taken[-1]["attempt"] == 1
    assert taken[1]["reserve_bytes"] < 0.6 * taken[0]["reserve_bytes"]


@pytest.mark.usefixtures("neighbours")
def test_an_overrun_is_answered_from_a_second_run_and_remembered(server, call, module):
    graph = lie(100)
    with torch.inference_mode():
        expected = module.linear(torch.from_numpy(graph.x)).numpy()
    assert_equal(infer(call, "liar", graph, tenant="first").outputs["output"], expected)
    first = row(server, "tenant = ?", "first")
    assert (first["status"], first["attempt"]) == ("OK", 2)
    # It waited for the device to be empty, and why is what counts.
    assert (first["violated"], first["cause"]) == (1, "estimate")
    assert metric(server, r'gnnserve_memory_underestimates_total\{model="liar"\}') == 1
    assert metric(server, r'gnnserve_memory_estimate_ratio_count\{model="liar"\}') == 1
    assert first["reserve_bytes"] < 1 << 20 < 100 << 20 <= first["pmc_measured_bytes"]
    assert_equal(infer(call, "liar", graph, tenant="second").outputs["output"], expected)
    second = row(server, "tenant = ?", "second")
    assert (second["status"], second["attempt"]) == ("OK", 1)
    assert second["reserve_bytes"] >= second["pmc_measured_bytes"] >= 100 << 20


@pytest.mark.usefixtures("neighbours")
def test_more_than_the_device_has_is_refused_with_the_numbers(server, call):
    with pytest.raises(grpc.RpcError) as caught:
        infer(call, "liar", lie(2 * BUDGET_MIB), tenant="greedy")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    words = r"would pass its limit of (\d+) bytes; the device has (\d+) bytes for tasks"
    limit, budget = map(int, re.search(words, caught.value.details()).groups())
    assert limit < budget <= BUDGET_MIB << 20
    assert budget - limit < 1 << 20, "the second run had all of it"
    assert row(server, "tenant = ?", "greedy")["reason"] == "out_of_memory"
