"""Models with lanes of their own: whatever one does to torch, others' answers are right."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from bench.kit.servers import ServerProcess
from tests.e2e import harm
from tests.e2e.harmed import LANES, PAUSE_S, graph, lanes_of, write_harmful
from tests.e2e.support import assert_equal, infer, raw_channel
from tests.processes import http_get, metric, row, rows, wait_for

#: Name and isolation of each model; all have the same weights.
MODELS = {"plain": "", "vandal": "model", "friend": "team", "partner": "team"}


def write(root, name: str, isolation: str, module) -> None:
    lines = f'isolation = "{isolation}"' if isolation else ""
    write_harmful(root, name, module=module, lines=lines)


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


@pytest.fixture
def others(isolated, module):
    """Others are asked all the while: all answered rightly, at the first try."""
    with torch.inference_mode():
        expected = module.linear(torch.from_numpy(graph().x)).numpy()
    going, before = True, lanes_up(isolated)
    with raw_channel(isolated) as call, ThreadPoolExecutor(1) as thread:

        def ask() -> int:
            asked = 0
            while going or asked < 10:
                answer = infer(call, "plain", graph(), tenant="others")
                assert_equal(answer.outputs["output"], expected)
                assert answer.parameters["lane"] < LANES
                asked += 1
                time.sleep(PAUSE_S)
            return asked

        asking = thread.submit(ask)
        yield
        going = False
        asked = asking.result()
    told = "tenant = 'others' AND attempt = 1 AND status = 'OK'"
    wait_for(lambda: len(rows(isolated, told)) >= asked, "a row of the first try for each")
    wait_for(lambda: lanes_up(isolated) == before, "the lanes that were there before")
    wait_for(lambda: len(lanes_of(isolated)) == before, "the end of the others' processes")


def lanes_up(server) -> int:
    return int(metric(server, "gnnserve_lanes_up"))


@pytest.mark.usefixtures("others")
def test_a_domain_that_the_start_did_not_find_gets_lanes_until_it_is_unloaded(
    isolated, call, module
):
    write(isolated.folder / "models", "late", "model", module)
    before, processes = lanes_up(isolated), lanes_of(isolated)
    with tritonclient.grpc.InferenceServerClient(isolated.target) as client:
        for _ in range(2):
            client.load_model("late")
            wait_for(lambda: lanes_up(isolated) == before + LANES, "as many lanes as the others")
            lanes = {infer(call, "late", graph()).parameters["lane"] for _ in range(10)}
            assert lanes.isdisjoint(range(before))
            assert processes < lanes_of(isolated)
            infer(call, "late", graph(harm.replace_functions))
            client.unload_model("late")
            wait_for(lambda: lanes_of(isolated) == processes, "the end of its lanes")
            assert lanes_up(isolated) == before


@pytest.mark.usefixtures("others")
def test_lanes_of_a_domain_that_ended_and_a_lane_that_restarts_go_with_it(isolated, call, module):
    write(isolated.folder / "models", "brief", "model", module)
    before, processes = lanes_up(isolated), lanes_of(isolated)
    with tritonclient.grpc.InferenceServerClient(isolated.target) as client:
        client.load_model("brief")
        infer(call, "brief", graph())
        for pid in lanes_of(isolated) - processes:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: lanes_up(isolated) == before, "their loss")
        client.unload_model("brief")
        wait_for(lambda: lanes_of(isolated) == processes, "the end of all")
        client.load_model("brief")
        infer(call, "brief", graph())
        client.unload_model("brief")


@pytest.mark.usefixtures("others")
def test_a_domain_whose_model_does_not_load_leaves_no_lanes(isolated, module):
    write(isolated.folder / "models", "broken", "model", module)
    (isolated.folder / "models" / "broken" / "model.py").write_text("raise ValueError('no')")
    with (
        tritonclient.grpc.InferenceServerClient(isolated.target) as client,
        pytest.raises(InferenceServerException, match="ValueError: no"),
    ):
        client.load_model("broken")


def test_models_that_share_a_domain_keep_its_lanes_until_the_last_is_unloaded(isolated, call):
    before = lanes_up(isolated)
    with tritonclient.grpc.InferenceServerClient(isolated.target) as client:
        client.unload_model("friend")
        assert infer(call, "partner", graph()).parameters["lane"] >= LANES
        client.unload_model("partner")
        wait_for(lambda: lanes_up(isolated) == before - LANES, "the end of their lanes")
        client.load_model("partner")
        client.load_model("friend")
    assert infer(call, "friend", graph()).parameters["lane"] >= LANES
    wait_for(lambda: lanes_up(isolated) == before, "their lanes")
