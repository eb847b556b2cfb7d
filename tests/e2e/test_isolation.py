"""Models with lanes of their own: whatever one does to torch, others' answers are right."""

import re
import shutil

import grpc
import numpy as np
import pytest
import torch
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from bench.kit.servers import ServerProcess
from serve.models.writer import write_model
from tests.e2e import harm
from tests.e2e.support import Graph, assert_equal, infer, raw_channel
from tests.processes import http_get, metric, row, wait_for

LANES = 2
#: Name and isolation of each model; all have the same weights.
MODELS = {"plain": "", "vandal": "model", "friend": "team", "partner": "team"}


def write(root, name: str, isolation: str, module) -> None:
    path = write_model(root, name, module, factory="./model.py:build", args={})
    shutil.copy(harm.__file__, path / "model.py")
    if isolation:
        config = path / "config.toml"
        text = config.read_text()
        told = re.sub(r"^(factory = .*)$", rf'\1\nisolation = "{isolation}"', text, flags=re.M)
        assert told != text
        config.write_text(told)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return harm.build()


@pytest.fixture(scope="module")
def isolated(tmp_path_factory, module):
    folder = tmp_path_factory.mktemp("isolated")
    for name, isolation in MODELS.items():
        write(folder / "models", name, isolation, module)
    sections = {"device": {"lanes": LANES, "memory_budget": "1 GiB"}}
    with ServerProcess(folder, repository=folder / "models", sections=sections) as found:
        yield found


@pytest.fixture
def call(isolated):
    with raw_channel(isolated) as found:
        yield found
    wait_for(lambda: metric(isolated, "gnnserve_memory_reserved_bytes") == 0, "an empty ledger")


def graph(deed=None) -> Graph:
    x = np.random.default_rng(3).standard_normal((3, 4), dtype=np.float32)
    x[0, 0] = 0.0 if deed is None else 1.0 + harm.DEEDS.index(deed)
    return Graph(x, np.zeros((2, 0), np.int64))


def test_functions_that_a_model_replaces_are_replaced_for_itself_alone(call, module):
    with torch.inference_mode():
        expected = module.linear(torch.from_numpy(graph().x)).numpy()
    for _ in range(8):
        infer(call, "vandal", graph(harm.replace_functions))
        for name in ("plain", "friend", "partner"):
            assert_equal(infer(call, name, graph()).outputs["output"], expected)
    # It did what it says.
    own = [infer(call, "vandal", graph()).outputs["output"] for _ in range(8)]
    assert any((one == 7.0).all() for one in own)


def test_domains_have_lanes_of_their_own_and_models_of_one_share_them(call):
    lanes = {name: set() for name in MODELS}
    for _ in range(10):
        for name, of in lanes.items():
            of.add(infer(call, name, graph()).parameters["lane"])
    shared = lanes["plain"]
    assert shared <= set(range(LANES))
    assert lanes["vandal"].isdisjoint(shared | lanes["friend"] | lanes["partner"])
    assert (lanes["friend"] | lanes["partner"]).isdisjoint(shared)
    assert lanes["friend"] & lanes["partner"]


def test_a_lane_that_a_model_ends_is_its_own(isolated, call):
    """Others lose none: what they ask is answered at the first try."""
    for number in range(2):
        with pytest.raises(grpc.RpcError, match="died while running it"):
            infer(call, "vandal", graph(harm.end_itself_by_a_signal))
        infer(call, "plain", graph(), tenant=f"plain{number}")
        assert row(isolated, "tenant = ?", f"plain{number}")["attempt"] == 1
    assert http_get(isolated, "/v2/health/ready")[0] == 200


def test_an_isolated_model_is_loaded_again_on_its_own_lanes(isolated, call):
    with tritonclient.grpc.InferenceServerClient(isolated.target) as client:
        client.unload_model("friend")
        client.load_model("friend")
    assert infer(call, "friend", graph()).parameters["lane"] >= LANES


def test_a_domain_that_the_start_did_not_find_is_refused_with_words(isolated, module):
    write(isolated.folder / "models", "late", "model", module)
    with (
        tritonclient.grpc.InferenceServerClient(isolated.target) as client,
        pytest.raises(InferenceServerException, match="no lanes for it; a server makes them"),
    ):
        client.load_model("late")
