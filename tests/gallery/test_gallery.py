"""Models that declare their inputs and outputs are served, and answer as PyG does here."""

import json
import re
import subprocess
import sys

import grpc
import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from bench.kit import gallery as entries
from bench.kit.gallery import BASIC, GALLERY
from bench.kit.servers import ROOT
from bench.kit.waiting import PATIENCE_S
from serve.client import Client
from serve.estimate.estimator import SAFETY_FACTOR
from serve.wire.messages import decode_response, encode_request

tritonclient = pytest.importorskip("tritonclient.grpc")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

#: Nodes and all other things of requests, from tiny to larger than what calibration traced.
SIZES = ((12, 30), (40, 200), (150, 300), (90, 2_000), (700, 4_000), (33, 41))


#: Models whose memory is no linear function of the counts: its estimate is an upper bound.
NOT_LINEAR = ("schnet", "unet")


def test_the_gallery_is_whole():
    assert len(GALLERY) == 15
    assert len({(entry.inputs, entry.outputs) for entry in BASIC.values()}) == len(BASIC) == 8


def reserved(estimate_bytes):
    """Return what is reserved for an estimated peak."""
    return max(SAFETY_FACTOR * estimate_bytes, estimate_bytes + 4096)


def test_the_load_generator_sends_every_model_valid_requests(gallery, server):
    """About eight each, of all models in one run."""
    models = gallery[1]
    count = 8 * len(models)
    workload = ",".join(f"{name}=1" for name in models)
    command = [
        sys.executable, "-m", "loadgen", "--target", server.target, "--workload", workload,
        "--rate", "30", "--requests", str(count), "--timeout", str(PATIENCE_S), "--json",
        "--scale", "0.01", "--max-nodes", "200", "--max-edges", "2000",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["by_status"] == {"OK": count}, seen["messages"]
    assert seen["by_model"].keys() == models.keys()


def assert_close(found, expected):
    """Equal in names, shapes and dtypes, and within 1e-4 of the scale."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert found[name].dtype == wanted.dtype
        assert found[name].shape == wanted.shape
        scale = float(np.abs(wanted).max(initial=1e-6))
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-4 * scale)


def ask(call, name, arrays, **parameters):
    message = encode_request(name, arrays, parameters=parameters)
    return decode_response(call(message, timeout=PATIENCE_S))


@pytest.mark.parametrize("name", GALLERY)
def test_answers_equal_pyg_and_need_no_more_than_estimated(gallery, call, name):
    loaded = gallery[1][name]
    for seed, size in enumerate(SIZES):
        arrays = entries.request(loaded, entries.interface(loaded).spread(*size), seed)
        answer = ask(call, name, arrays)
        assert_close(answer.outputs, entries.expected(loaded, arrays))
        facts = answer.parameters
        assert facts["pmc_measured_bytes"] <= reserved(facts["pmc_estimate_bytes"]), (size, facts)
        if name not in NOT_LINEAR:
            measured = facts["pmc_measured_bytes"]
            assert facts["pmc_estimate_bytes"] <= 1.02 * measured + 8192, (size, facts)


@pytest.mark.parametrize("kind", range(4))
def test_edges_of_one_type_alone_need_no_more_than_estimated(gallery, call, kind):
    loaded = gallery[1]["rgcn"]
    for seed, size in enumerate(SIZES):
        arrays = entries.request(loaded, entries.interface(loaded).spread(*size), seed)
        arrays["edge_type"][:] = kind
        answer = ask(call, "rgcn", arrays)
        assert_close(answer.outputs, entries.expected(loaded, arrays))
        facts = answer.parameters
        measured = facts["pmc_measured_bytes"]
        assert measured <= reserved(facts["pmc_estimate_bytes"]), (size, facts)
        assert facts["pmc_estimate_bytes"] <= 1.02 * measured + 8192, (size, facts)


@pytest.mark.parametrize("name", GALLERY)
def test_a_stock_client_gets_the_same(gallery, server, name):
    loaded = gallery[1][name]
    interface = entries.interface(loaded)
    arrays = entries.request(loaded, interface.spread(30, 90), seed=99)
    with tritonclient.InferenceServerClient(server.target) as client:
        metadata = client.get_model_metadata(name, as_json=True)
        config = client.get_model_config(name, as_json=True)["config"]
        assert [one["name"] for one in metadata["inputs"]] == [s.name for s in interface.inputs]
        assert [one["datatype"] for one in metadata["outputs"]] == [
            slot.datatype for slot in interface.outputs
        ]
        if loaded.spec.interface is not None:
            told = json.loads(config["parameters"]["interface"]["string_value"])
            assert [one["name"] for one in told["inputs"]] == [s.name for s in interface.inputs]
        inputs = []
        for one in metadata["inputs"]:
            array = arrays[one["name"]]
            tensor = tritonclient.InferInput(one["name"], list(array.shape), one["datatype"])
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        found = client.infer(name, inputs)
        wanted = entries.expected(loaded, arrays)
        assert_close({slot.name: found.as_numpy(slot.name) for slot in interface.outputs}, wanted)
        first = interface.outputs[0].name
        only = client.infer(name, inputs, outputs=[tritonclient.InferRequestedOutput(first)])
        assert [output.name for output in only.get_response().outputs] == [first]


def test_what_may_be_left_out_has_its_default(gallery, call):
    loaded = gallery[1]["recurrent"]
    arrays = entries.request(loaded, (20, 60), seed=1)
    few = {name: arrays[name] for name in ("x", "edge_index")}
    given = few | {"edge_weight": np.ones(60, np.float32)}
    assert_close(ask(call, "recurrent", few).outputs, entries.expected(loaded, given))
    loaded = gallery[1]["molecules"]
    arrays = entries.request(loaded, (20, 60), seed=1)
    del arrays["batch"]
    answer = ask(call, "molecules", arrays)
    assert answer.outputs["y"].shape == (1, 1)
    assert_close(answer.outputs, entries.expected(loaded, arrays))


def test_int32_indices_are_widened(gallery, call):
    loaded = gallery[1]["hgt"]
    arrays = entries.request(loaded, entries.interface(loaded).spread(30, 90), seed=2)
    narrow = {n: a.astype(np.int32) if a.dtype == np.int64 else a for n, a in arrays.items()}
    assert_close(ask(call, "hgt", narrow).outputs, entries.expected(loaded, arrays))


def changed(arrays, name, place, value):
    copy = arrays[name].copy()
    copy[place] = value
    return arrays | {name: copy}


@pytest.mark.parametrize(
    ("model", "change", "told"),
    [
        ("rgcn", lambda a: changed(a, "edge_type", 3, 4), r"'edge_type' \[3\] is 4; .* \[0, 4\)"),
        ("rgcn", lambda a: changed(a, "edge_index", (1, 2), 12), r"\[1, 2\] is 12; .* of N"),
        (
            "hgt",
            lambda a: changed(a, "edge_index.author__writes__paper", (0, 0), 6),
            r"\[0, 0\] is 6; it must be in \[0, 6\), the number of N\.author",
        ),
        ("molecules", lambda a: changed(a, "batch", 0, -1), r"'batch' \[0\] is -1"),
        (
            "ogb",
            lambda a: changed(a, "x", (3, 1), 5),
            r"'x' \[3, 1\] is 5; in this column it must be in \[0, 5\)",
        ),
        ("schnet", lambda a: changed(a, "pos", (2, 1), np.nan), r"'pos' \[2, 1\] is nan"),
        (
            "links",
            lambda a: a | {"edge_label_index": a["edge_label_index"][:1]},
            r"1 on axis 0 of shape",
        ),
        (
            "rgcn",
            lambda a: a | {"edge_type": a["edge_type"][:-1]},
            r"'edge_type': 29 E, but 'edge_index' has 30 E",
        ),
        ("rgcn", lambda a: {n: a[n] for n in ("x", "edge_index")}, "'edge_type' is missing"),
        (
            "rgcn",
            lambda a: a | {"edge_type": a["edge_type"].astype(np.float32)},
            "datatype FP32, but INT64 is required",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(gallery, call, model, change, told):
    loaded = gallery[1][model]
    arrays = entries.request(loaded, entries.interface(loaded).spread(12, 30), seed=3)
    if model == "links":
        arrays = entries.request(loaded, (12, 30, 30), seed=3)
    with pytest.raises(grpc.RpcError) as caught:
        ask(call, model, change(arrays))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() is not None
    assert re.search(told, caught.value.details()), caught.value.details()


def test_our_client_sends_pyg_objects(gallery, server):
    relational, hetero = gallery[1]["rgcn"], gallery[1]["hgt"]
    arrays = entries.request(relational, (20, 60), seed=5)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    kinds = entries.request(hetero, (20, 30, 40, 50, 60), seed=6)
    data = HeteroData()
    for name, array in kinds.items():
        base, _, key = name.partition(".")
        data[tuple(key.split("__")) if "__" in key else key][base] = torch.from_numpy(array)
    with Client(server.target) as client:
        answer = client.infer("rgcn", Data(**tensors))
        assert_close(answer.outputs, entries.expected(relational, arrays))
        answer = client.infer("hgt", data)
        assert_close(answer.outputs, entries.expected(hetero, kinds))
