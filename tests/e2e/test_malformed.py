"""Malformed requests: an error that names the tensor, the place and the rule, and nothing else."""

import random
import re
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from serve.pb import grpc_service_pb2 as pb
from serve.pb import grpc_service_pb2_grpc
from serve.wire.messages import encode_request
from tests.e2e.support import GOOD, assert_answers
from tests.processes import PATIENCE_S, metric, wait_for

Request = pb.ModelInferRequest
Edit = Callable[[Request], None]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
X, EDGES = 0, 1


def good_request() -> Request:
    return Request.FromString(encode_request("gcn", GOOD.tensors))


def refusal(call, message: bytes, **options) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=PATIENCE_S, **options)
    return caught.value


@pytest.fixture(autouse=True)
def still_serving(server):
    yield
    assert_answers(server)


# -- edits of a good request ------------------------------------------------------------------


def put(position: int, index: tuple[int, int], value: float, dtype: str = "") -> Edit:
    """Replace one element of a tensor, which is sent as `dtype`."""

    def edit(request: Request) -> None:
        array = (GOOD.x if position == X else GOOD.edge_index).copy()
        array = array.astype(dtype or array.dtype)
        array[index] = value
        request.raw_input_contents[position] = array.tobytes()
        if dtype:
            request.inputs[position].datatype = dtype.upper()

    return edit


def shape(position: int, *dims: int) -> Edit:
    def edit(request: Request) -> None:
        request.inputs[position].shape[:] = dims

    return edit


def datatype(position: int, name: str) -> Edit:
    def edit(request: Request) -> None:
        request.inputs[position].datatype = name

    return edit


def raw(position: int, change: Callable[[bytes], bytes]) -> Edit:
    def edit(request: Request) -> None:
        request.raw_input_contents[position] = change(request.raw_input_contents[position])

    return edit


def rename(position: int, name: str) -> Edit:
    def edit(request: Request) -> None:
        request.inputs[position].name = name

    return edit


def drop(position: int) -> Edit:
    def edit(request: Request) -> None:
        del request.inputs[position]
        del request.raw_input_contents[position]

    return edit


def parameter(name: str, **value: object) -> Edit:
    def edit(request: Request) -> None:
        request.parameters[name].CopyFrom(pb.InferParameter(**value))

    return edit


def no_nodes(request: Request) -> None:
    shape(X, 0, 32)(request)
    request.raw_input_contents[X] = b""


def both_forms(request: Request) -> None:
    request.inputs[X].contents.fp32_contents.extend([1.0] * 960)


def wrong_contents(request: Request) -> None:
    del request.raw_input_contents[:]
    request.inputs[X].contents.int_contents.extend([1] * 960)


def one_raw_less(request: Request) -> None:
    del request.raw_input_contents[EDGES]


def other_output(request: Request) -> None:
    request.outputs.add(name="logits")


def long_id(request: Request) -> None:
    request.id = "x" * 300


def weights_too(request: Request) -> None:
    request.inputs.add(name="edge_weight", datatype="FP32", shape=[90])
    request.raw_input_contents.append(bytes(360))


MALFORMED: dict[str, tuple[Edit, str]] = {
    "edge too high": (put(EDGES, (1, 5), 30), r"'edge_index' \[1, 5\] is 30; .* in \[0, 30\)"),
    "edge negative": (put(EDGES, (0, 3), -1), r"'edge_index' \[0, 3\] is -1; .* in \[0, 30\)"),
    "edge far off": (
        put(EDGES, (0, 0), -(2**63)),
        r"'edge_index' \[0, 0\] is -9223372036854775808",
    ),
    "INT32 edge too high": (put(EDGES, (1, 89), 2**31 - 1, "int32"), r"\[1, 89\] is 2147483647"),
    "INT32 edge negative": (put(EDGES, (0, 7), -5, "int32"), r"'edge_index' \[0, 7\] is -5"),
    "feature NaN": (put(X, (3, 4), np.nan), r"'x' \[3, 4\] is nan; .*finite \(1 of 960"),
    "feature infinite": (put(X, (29, 31), -np.inf), r"'x' \[29, 31\] is -inf; .*finite"),
    "x of doubles": (datatype(X, "FP64"), r"'x': datatype FP64, but FP32 is required"),
    "edges of floats": (datatype(EDGES, "FP32"), r"'edge_index': .*FP32, but INT64 or INT32"),
    "edges unsigned": (datatype(EDGES, "UINT64"), r"'edge_index': .*UINT64, but INT64 or INT32"),
    "bytes as x": (datatype(X, "BYTES"), r"'x': datatype BYTES, but FP32"),
    "unknown datatype": (datatype(X, "FP31"), r"'x': unknown datatype 'FP31'"),
    "x of rank 1": (shape(X, 960), r"'x': rank 1 \(shape \[960\]\), but rank 2"),
    "x of rank 3": (shape(X, 30, 32, 1), r"'x': rank 3"),
    "edges of rank 1": (shape(EDGES, 180), r"'edge_index': rank 1"),
    "edges transposed": (shape(EDGES, 90, 2), r"'edge_index': 90 on axis 0 .*2 is required"),
    "three rows of edges": (shape(EDGES, 3, 60), r"'edge_index': 3 on axis 0"),
    "other features": (shape(X, 60, 16), r"'x': 16 on axis 1 .*32 is required"),
    "no features": (shape(X, 30, 0), r"'x': 0 on axis 1"),
    "a byte short": (raw(X, lambda data: data[:-1]), r"'x': 3839 bytes, .*\[30, 32\].*3840"),
    "a byte more": (raw(EDGES, lambda data: data + b"\0"), r"'edge_index': 1441 bytes, .*1440"),
    "no bytes": (raw(X, lambda data: b""), r"'x': 0 bytes, .*3840"),
    "one node more": (shape(X, 31, 32), r"'x': 3840 bytes, .*\[31, 32\].*3968"),
    "2^31 nodes": (shape(X, 2**31, 32), r"'x': 3840 bytes, but shape \[2147483648, 32\]"),
    "2^62 edges": (shape(EDGES, 2, 2**62), r"'edge_index': 1440 bytes, but shape \[2, 46116860"),
    "negative nodes": (shape(X, -30, 32), r"'x': shape \[-30, 32\] is negative on axis 0"),
    "negative edges": (shape(EDGES, 2, -1), r"'edge_index': .* negative on axis 1"),
    "edges, no nodes": (no_nodes, r"'edge_index': 90 edges in a graph of 0 nodes"),
    "no edge_index": (drop(EDGES), r"'edge_index' is missing; .*requires x, edge_index"),
    "no x": (drop(X), r"'x' is missing"),
    "unknown tensor": (rename(X, "features"), r"no input 'features'; it takes x, edge_index"),
    "x twice": (rename(EDGES, "x"), r"inputs\[1\]: tensor 'x' is given twice"),
    "not taken": (weights_too, r"'gcn' has no input 'edge_weight'"),
    "raw for one only": (one_raw_less, r"raw_input_contents: 1 entries for 2 inputs"),
    "raw and typed": (both_forms, r"'x': has contents beside raw_input_contents"),
    "typed as another": (wrong_contents, r"'x': contents.int_contents .*FP32 .*fp32_contents"),
    "unknown output": (other_output, r"outputs\[0\]: .*no output 'logits'; it has output"),
    "long id": (long_id, r"id: 300 characters"),
    "timeout a text": (
        parameter("timeout", string_param="1"),
        r"'timeout': a text \(string_param\) is given",
    ),
    "timeout negative": (parameter("timeout", int64_param=-1), r"'timeout': -1 is not in \[0,"),
    "target of nothing": (parameter("qos_target_us", int64_param=0), r"'qos_target_us': 0 is"),
    "tenant a number": (
        parameter("tenant", int64_param=1),
        r"'tenant': a whole number \(int64_param\)",
    ),
    "graph alone": (
        parameter("graph", string_param="cora"),
        r"'graph' is given without .*node_ids",
    ),
    "node_ids alone": (rename(X, "node_ids"), r"'node_ids'"),
}


@pytest.mark.parametrize(("edit", "words"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_requests_are_refused_with_the_reason(call, edit, words):
    request = good_request()
    edit(request)
    error = refusal(call, request.SerializeToString())
    assert error.code() is INVALID, error
    assert re.search(words, error.details()), error.details()


def test_unknown_things_are_not_found(call):
    request = good_request()
    request.model_name = "gnc"
    error = refusal(call, request.SerializeToString())
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert re.search("unknown model 'gnc'; .*gat, gcn, gin, sage", error.details())

    for version in ("7", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 200):
        request = good_request()
        request.model_version = version
        error = refusal(call, request.SerializeToString())
        assert error.code() is grpc.StatusCode.NOT_FOUND
        told = version if len(version) < 100 else "9+…"
        assert re.search(f"model 'gcn' has no version '{told}'; it has: 1", error.details())

    ids = encode_request("gcn", {"node_ids": np.arange(3)}, parameters={"graph": "citeseer"})
    error = refusal(call, ids)
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "unknown graph 'citeseer'; this server holds: community" in error.details()


def test_a_version_of_thousands_of_digits_is_no_bug_of_the_server(server):
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelMetadata(
            pb.ModelMetadataRequest(name="gcn", version="9" * 5000), timeout=PATIENCE_S
        )
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "message", [b"\xff" * 100, encode_request("gcn", GOOD.tensors)[:-7], b"\x0a\x7f"]
)
def test_bytes_that_are_no_message_are_refused(call, message):
    error = refusal(call, message)
    assert error.code() is INVALID
    assert "malformed" in error.details()


def test_shared_memory_that_was_never_registered(call):
    request = good_request()
    request.inputs[X].parameters["shared_memory_region"].string_param = "pool"
    error = refusal(call, request.SerializeToString())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "2 entries for 1 inputs" in error.details()
    del request.raw_input_contents[X]
    error = refusal(call, request.SerializeToString())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tensor 'x': parameter 'shared_memory_byte_size' is missing" in error.details()
    request.inputs[X].parameters["shared_memory_byte_size"].int64_param = 360
    error = refusal(call, request.SerializeToString())
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "tensor 'x': unknown shared memory region 'pool'" in error.details()


# -- any request at all -----------------------------------------------------------------------

SENSIBLE = {
    None,  # answered
    INVALID,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
_ODD_INTEGERS = (-(2**63), -1, 0, 1, 2, 3, 29, 31, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
_NAMES = ("x", "edge_index", "edge_weight", "edge_attr", "batch", "node_ids", "", "x\0", "é" * 40)
_DATATYPES = ("FP32", "FP64", "INT64", "INT32", "BYTES", "BF16", "", "fp32")


def mutate_fields(request: Request, rng: random.Random) -> None:
    """One change to the message's structure."""
    tensor = rng.choice(request.inputs) if request.inputs else request.inputs.add()
    match rng.randrange(9):
        case 0:
            tensor.name = rng.choice(_NAMES)
        case 1:
            tensor.datatype = rng.choice(_DATATYPES)
        case 2:
            tensor.shape[:] = rng.choices(_ODD_INTEGERS, k=rng.randrange(5))
        case 3 if len(tensor.shape):
            tensor.shape[rng.randrange(len(tensor.shape))] = rng.choice(_ODD_INTEGERS)
        case 4 if request.raw_input_contents:
            where = rng.randrange(len(request.raw_input_contents))
            request.raw_input_contents[where] = rng.randbytes(rng.randrange(5_000))
        case 5:
            name = rng.choice(("timeout", "priority", "tenant", "seed", "graph", "qos_target_us"))
            held = rng.choice(("int64_param", "string_param", "bool_param", "double_param"))
            value = {"string_param": "é" * 9, "bool_param": True, "double_param": float("nan")}
            parameter(name, **{held: value.get(held, rng.choice(_ODD_INTEGERS))})(request)
        case 6:
            request.inputs.add().CopyFrom(tensor)
        case 7:
            request.model_version = rng.choice(("", "1", "01", "-1", "../gat", "9" * 30))
        case _:
            request.model_name = rng.choice(
                ("gcn", "", ".", "..", "../models/gcn", "gcn\0", "g" * 999)
            )


def mutate_bytes(message: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, or, less often, cut out or put in."""
    changed = bytearray(message)
    for _ in range(rng.randrange(1, 4)):
        # More often near the start, where the structure is.
        at = int(len(changed) * rng.random() ** rng.choice((1, 3)))
        match rng.randrange(6):
            case 0:
                del changed[at : at + rng.randrange(1, 50)]
            case 1:
                changed[at:at] = rng.randbytes(rng.randrange(1, 10))
            case _:
                changed[at : at + 1] = rng.randbytes(1)
    return bytes(changed)


@pytest.mark.parametrize("seed", range(6))
def test_any_request_is_answered_sensibly(server, call, seed):
    rng = random.Random(seed)
    seen = set()
    for number in range(50):
        request = good_request()
        for _ in range(rng.choice((0, 1, 1, 2)) if number % 2 else 1):
            mutate_fields(request, rng)
        message = request.SerializeToString()
        if number % 2:
            message = mutate_bytes(message, rng)
        code, words = answer_to(call, message)
        assert code in SENSIBLE, f"seed {seed}, {number}: {code} {words}"
        assert words
        seen.add(code)
    assert {None, INVALID} <= seen
    wait_for(lambda: metric(server, "gnnserve_memory_reserved_bytes") == 0, "an empty ledger")


def answer_to(call, message: bytes) -> tuple[grpc.StatusCode | None, str]:
    """The code, None for an answer, and the words that came with it."""
    try:
        call(message, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return None, "answered"
