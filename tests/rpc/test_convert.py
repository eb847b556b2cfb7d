"""Rules for requests: each one, and what its message names."""

import numpy as np
import pytest

from serve.errors import DeadlineExceeded, InvalidInput, Unsupported
from serve.pb import grpc_service_pb2 as pb
from serve.rpc.convert import decode_call
from serve.server.regions import Regions
from serve.wire.messages import decode_request, encode_request
from tests.rpc.fakes import FEATURES, model_info

MODEL = model_info(extra=("edge_weight", "edge_attr", "batch"))
NEVER_S = 9e18
REGIONS = Regions(offered=False)
X = np.ones((3, FEATURES), np.float32)
EDGES = np.array([[0, 1], [1, 2]], np.int64)


def decode(message, model=MODEL, remaining_s=NEVER_S):
    return decode_call(
        decode_request(message), model, REGIONS, arrived_ns=5, remaining_s=remaining_s
    )


def call(tensors=None, remaining_s=NEVER_S, **parameters):
    tensors = {"x": X, "edge_index": EDGES} if tensors is None else tensors
    return decode(encode_request("gcn", tensors, parameters=parameters), remaining_s=remaining_s)


def wired(*inputs, raws=(), outputs=()):
    """Serialize a request with `(name, datatype, shape)` inputs and any raw contents."""
    request = pb.ModelInferRequest(model_name="gcn", raw_input_contents=raws, outputs=outputs)
    for name, datatype, shape in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
    return request


def refuse(request, says, kind=InvalidInput):
    with pytest.raises(kind) as caught:
        decode(request if isinstance(request, bytes) else request.SerializeToString())
    for part in says if isinstance(says, tuple) else (says,):
        assert part in str(caught.value)


def test_a_good_request_becomes_a_call_without_copies():
    message = encode_request("gcn", {"x": X, "edge_index": EDGES}, version="1", request_id="r-1")
    found = decode(message)
    assert (found.model, found.version, found.client_id, found.arrived_ns) == ("gcn", "1", "r-1", 5)
    assert list(found.tensors) == ["x", "edge_index"]
    x = found.tensors["x"]
    assert (x.datatype, x.shape, bytes(x.data)) == ("FP32", (3, FEATURES), X.tobytes())
    assert x.data.obj is message
    assert (found.qos_target_ns, found.timeout_ns, found.priority) == (None, None, 0)
    assert (found.tenant, found.seed, found.graph) == ("", None, None)


def test_edges_may_be_int32_and_the_order_of_inputs_is_free():
    found = call({"edge_index": EDGES.astype(np.int32), "x": X})
    assert found.tensors["edge_index"].datatype == "INT32"


@pytest.mark.parametrize(
    ("nodes", "edges"), [(3, 0), (0, 0), (1, 0)], ids=["no edges", "nothing", "one node"]
)
def test_empty_graphs_are_graphs(nodes, edges):
    found = call({"x": X[:nodes], "edge_index": EDGES[:, :edges]})
    assert found.tensors["x"].shape == (nodes, FEATURES)
    assert len(found.tensors["edge_index"].data) == 0


def test_optional_inputs_are_counted_against_the_graph():
    good = {
        "x": X,
        "edge_index": EDGES,
        "edge_weight": np.ones(2, np.float32),
        "edge_attr": np.ones((2, 2), np.float32),
        "batch": np.zeros(3, np.int64),
    }
    assert set(call(good).tensors) == set(good)
    for name, array, says in (
        ("edge_weight", np.ones(3, np.float32), "3 rows, but 'edge_index' has 2 edges"),
        ("edge_attr", np.ones((1, 2), np.float32), "1 rows, but 'edge_index' has 2 edges"),
        ("batch", np.zeros(2, np.int64), "2 rows, but 'x' has 3 nodes"),
    ):
        refuse(encode_request("gcn", {**good, name: array}), (f"'{name}'", says))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"x": X}, ("'edge_index' is missing", "x, edge_index")),
        ({"edge_index": EDGES}, "'x' is missing"),
        ({}, "'x' is missing"),
        (
            {"x": X, "edge_index": EDGES, "y": X},
            ("inputs[2]", "no input 'y'", "x, edge_index, edge_weight"),
        ),
        ({"x": X.astype(np.float64), "edge_index": EDGES}, ("'x'", "FP64", "FP32 is required")),
        (
            {"x": X, "edge_index": EDGES.astype(np.float32)},
            ("'edge_index'", "FP32", "INT64 or INT32"),
        ),
        ({"x": X[0], "edge_index": EDGES}, ("'x'", "rank 1", "rank 2")),
        ({"x": X[:, :3], "edge_index": EDGES}, ("'x'", "3 on axis 1", "4 is required")),
        ({"x": X, "edge_index": EDGES.T[:1]}, ("'edge_index'", "1 on axis 0", "2 is required")),
        ({"x": X[:0], "edge_index": EDGES}, ("'edge_index'", "2 edges in a graph of 0 nodes")),
    ],
)
def test_wrong_tensors_are_named(tensors, says):
    refuse(encode_request("gcn", tensors), says)


def test_an_input_given_twice_is_refused():
    pair = ("x", "FP32", [0, FEATURES])
    refuse(wired(pair, pair, raws=[b"", b""]), ("inputs[1]", "'x' is given twice"))


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "says"),
    [
        ("FLOAT", [1, FEATURES], bytes(16), ("unknown datatype 'FLOAT'", "FP32")),
        ("FP32", [-1, FEATURES], b"", ("[-1, 4]", "negative on axis 0")),
        ("FP32", [2, FEATURES], bytes(16), ("16 bytes", "[2, 4]", "needs 32")),
        ("FP32", [2, FEATURES], bytes(33), ("33 bytes", "needs 32")),
        ("FP32", [2**31, FEATURES], bytes(16), ("16 bytes", f"needs {2**35}")),
        ("FP32", [2**62, FEATURES], b"", f"needs {2**66}"),
    ],
)
def test_claims_about_x_are_checked_by_arithmetic(datatype, shape, raw, says):
    edges = ("edge_index", "INT64", [2, 0])
    refuse(wired(("x", datatype, shape), edges, raws=[raw, b""]), ("'x'", *_tuple(says)))


def _tuple(says):
    return says if isinstance(says, tuple) else (says,)


def test_rows_that_cost_no_bytes_cannot_be_claimed():
    from dataclasses import replace

    spec = replace(MODEL.inputs[0], shape=(-1, -1))
    model = replace(MODEL, inputs=(spec, *MODEL.inputs[1:]))
    request = wired(("x", "FP32", [2**40, 0]), ("edge_index", "INT64", [2, 0]), raws=[b"", b""])
    with pytest.raises(InvalidInput, match="0 on axis 1"):
        decode(request.SerializeToString(), model)


def test_raw_contents_are_for_all_inputs_or_none():
    x, edges = ("x", "FP32", [0, FEATURES]), ("edge_index", "INT64", [2, 0])
    refuse(wired(x, edges, raws=[b""]), "1 entries for 2 inputs")
    mixed = wired(x, edges, raws=[b"", b""])
    mixed.inputs[1].contents.int64_contents.append(1)
    refuse(mixed, ("'edge_index'", "contents beside raw_input_contents"))
    mixed.inputs[1].contents.ClearField("int64_contents")  # present and empty: harmless
    assert decode(mixed.SerializeToString()).tensors["x"].shape == (0, FEATURES)


def test_typed_contents_are_taken_too():
    request = wired(("x", "FP32", [1, FEATURES]), ("edge_index", "INT32", [2, 1]))
    request.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4.5])
    request.inputs[1].contents.int_contents.extend([0, 0])
    found = decode(request.SerializeToString())
    assert np.frombuffer(found.tensors["x"].data, "<f4").tolist() == [1, 2, 3, 4.5]
    assert found.tensors["edge_index"].data == bytes(8)

    request.inputs[0].contents.fp32_contents.pop()
    refuse(request, ("'x'", "3 elements in contents", "needs 4"))
    request.inputs[0].contents.int_contents.append(1)
    refuse(request, ("'x'", "int_contents", "belongs in fp32_contents"))


def test_missing_contents_are_missing_elements():
    request = wired(("x", "FP32", [2**31, FEATURES]), ("edge_index", "INT64", [2, 0]))
    refuse(request, ("'x'", "0 elements in contents", f"needs {2**33}"))


def test_resident_graphs_take_node_ids_and_nothing_else():
    ids = np.array([4, 2], np.int64)
    found = call({"node_ids": ids}, graph="cora", seed=-3)
    assert (found.graph, found.seed) == ("cora", -3)
    assert list(found.tensors) == ["node_ids"]
    cora = {"graph": "cora"}
    refuse(encode_request("gcn", {"node_ids": ids}), "'node_ids' is given without parameter")
    refuse(
        encode_request("gcn", {"x": X, "edge_index": EDGES}, parameters=cora),
        "parameter 'graph' is given without tensor 'node_ids'",
    )
    refuse(
        encode_request("gcn", {"node_ids": ids, "x": X}, parameters=cora),
        ("'x'", "graph 'cora' has its own"),
    )
    refuse(
        encode_request("gcn", {"node_ids": ids.astype(np.int32)}, parameters=cora),
        ("'node_ids'", "INT32", "INT64 is required"),
    )


def test_only_the_output_can_be_asked_for():
    x, edges = ("x", "FP32", [0, FEATURES]), ("edge_index", "INT64", [2, 0])
    output = pb.ModelInferRequest.InferRequestedOutputTensor
    asked = wired(x, edges, outputs=[output(name="output")])
    assert decode(asked.SerializeToString())
    refuse(wired(x, edges, outputs=[output(name="logits")]), ("outputs[0]", "'logits'", "output"))
    classified = output(name="output")
    classified.parameters["classification"].int64_param = 3
    refuse(wired(x, edges, outputs=[classified]), "'classification'", Unsupported)


def test_shared_memory_where_it_is_not_offered():
    request = wired(("x", "FP32", [0, FEATURES]))
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 0
    refuse(request, ("'x'", "shared memory"), Unsupported)


def test_parameters_reach_the_call():
    found = call(qos_target_us=1500, timeout=2500, priority=2, tenant="acme", seed=7)
    assert (found.qos_target_ns, found.timeout_ns) == (1_500_000, 2_500_000)
    assert (found.priority, found.tenant, found.seed) == (2, "acme", 7)


def test_unknown_parameters_are_tolerated():
    assert call(triton_enable_empty_final_response=True, sequence_id=3, note="x")


def test_priority_may_be_unsigned():
    request = wired(("x", "FP32", [0, FEATURES]), ("edge_index", "INT64", [2, 0]))
    request.parameters["priority"].uint64_param = 1
    assert decode(request.SerializeToString()).priority == 1


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("timeout", "1", "a text (string_param) is given, expected a whole number (int64_param)"),
        ("timeout", 1.0, "(double_param) is given, expected a whole number"),
        ("timeout", -1, "-1 is not in [0, "),
        ("qos_target_us", 0, "0 is not in [1, "),
        ("qos_target_us", 2**62, "is not in [1, "),
        ("qos_target_us", True, "true or false (bool_param) is given"),
        ("priority", -1, "-1 is not in [0, "),
        ("priority", "high", "expected a whole number (int64_param) or"),
        ("tenant", 4, "(int64_param) is given, expected a text"),
        ("tenant", "t" * 257, "257 characters, at most 256"),
        ("seed", 0.5, "expected a whole number"),
        ("graph", 1, "expected a text"),
    ],
)
def test_parameters_have_types_and_ranges(name, value, says):
    message = encode_request("gcn", {"x": X, "edge_index": EDGES}, parameters={name: value})
    refuse(message, (f"parameter '{name}'", says))


def test_a_parameter_without_a_value_is_refused():
    request = wired(("x", "FP32", [0, FEATURES]), ("edge_index", "INT64", [2, 0]))
    request.parameters["timeout"].SetInParent()
    refuse(request, "no value is given, expected a whole number")


@pytest.mark.parametrize(
    ("timeout_us", "remaining_s", "expected_ns"),
    [
        (None, NEVER_S, None),
        (0, NEVER_S, None),
        (2000, NEVER_S, 2_000_000),
        (None, 0.5, 500_000_000),
        (2000, 0.5, 2_000_000),
        (2_000_000, 0.5, 500_000_000),
    ],
)
def test_the_smaller_of_deadline_and_timeout_counts(timeout_us, remaining_s, expected_ns):
    parameters = {} if timeout_us is None else {"timeout": timeout_us}
    assert call(remaining_s=remaining_s, **parameters).timeout_ns == expected_ns


def test_a_deadline_that_has_passed_is_not_worked_on():
    with pytest.raises(DeadlineExceeded):
        call(remaining_s=0.0)


def test_long_ids_are_refused():
    refuse(encode_request("gcn", {}, request_id="i" * 257), ("id", "257 characters"))
