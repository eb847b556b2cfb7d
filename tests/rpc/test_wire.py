"""The codec against the protobuf library, both ways, and against garbage."""

import random
import struct
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from serve import native
from serve.pb import grpc_service_pb2 as pb
from serve.wire import messages as wire
from serve.wire import protobuf as wire_library

arrays = npst.arrays(
    dtype=st.sampled_from([k.dtype for k in wire.DATATYPES.values() if k.dtype]),
    shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=300),
)


@settings(max_examples=50)
@given(st.lists(arrays, max_size=4))
def test_what_is_encoded_is_what_the_library_reads(tensors):
    named = {f"t{i}": array for i, array in enumerate(tensors)}
    message = wire.encode_request("gcn", named, version="2", request_id="é")
    parsed = pb.ModelInferRequest.FromString(message)
    assert (parsed.model_name, parsed.model_version, parsed.id) == ("gcn", "2", "é")
    assert len(parsed.raw_input_contents) == len(parsed.inputs) == len(named)
    for wired, raw, array in zip(parsed.inputs, parsed.raw_input_contents, tensors, strict=True):
        assert tuple(wired.shape) == array.shape
        assert raw == array.tobytes()
    # The library writes fields in its own order, which is read the same way.
    for written in (message, parsed.SerializeToString()):
        request = wire.decode_request(written)
        assert (request.model, request.version, request.request_id) == ("gcn", "2", "é")
        assert [bytes(raw) for raw in request.raws] == list(parsed.raw_input_contents)
        assert [tensor.shape for tensor in request.inputs] == [array.shape for array in tensors]


texts = st.text(max_size=5) | st.just("name")
parameters = st.dictionaries(
    texts,
    st.builds(pb.InferParameter)
    | st.builds(pb.InferParameter, bool_param=st.booleans())
    | st.builds(pb.InferParameter, int64_param=st.integers(-(2**63), 2**63 - 1))
    | st.builds(pb.InferParameter, string_param=texts)
    | st.builds(pb.InferParameter, double_param=st.floats(allow_nan=False))
    | st.builds(pb.InferParameter, uint64_param=st.integers(0, 2**64 - 1)),
    max_size=3,
)
shapes = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)
raw_contents = st.lists(st.binary(max_size=200), max_size=3)
head = {"model_name": texts, "model_version": texts, "id": texts, "parameters": parameters}
tensor = {"name": texts, "datatype": texts, "shape": shapes, "parameters": parameters}
tensor["contents"] = st.none() | st.builds(pb.InferTensorContents, int_contents=st.just([1]))
Request, Response = pb.ModelInferRequest, pb.ModelInferResponse
requests = st.builds(
    Request,
    **head,
    inputs=st.lists(st.builds(Request.InferInputTensor, **tensor), max_size=3),
    outputs=st.lists(
        st.builds(Request.InferRequestedOutputTensor, name=texts, parameters=parameters), max_size=2
    ),
    raw_input_contents=raw_contents,
)
responses = st.builds(
    Response,
    **head,
    outputs=st.lists(st.builds(Response.InferOutputTensor, **tensor), max_size=3),
    raw_output_contents=raw_contents,
)


def read_alike(is_request, message):
    """Return True when the native codec reads the message; checks that the library agrees."""
    found = native.decode_infer(is_request, message)
    if found is None:
        return False
    assert typed(found) == typed(wire_library.decode_infer(is_request, message))
    return True


def typed(value):
    """Return the value with its types, so that True differs from 1 and NaN equals itself."""
    if isinstance(value, dict):
        return {name: typed(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [typed(item) for item in value]
    return type(value), struct.pack("d", value) if isinstance(value, float) else value


@settings(max_examples=300)
@given(requests | responses)
def test_any_message_of_the_library_is_read_alike(message):
    is_request = isinstance(message, Request)
    tensors = message.inputs if is_request else message.outputs
    groups = [message.parameters, *(t.parameters for t in tensors)]
    if is_request:
        groups += [output.parameters for output in message.outputs]
    held = [p.WhichOneof("parameter_choice") for group in groups for p in group.values()]
    plain = not {None, "uint64_param"} & set(held)
    plain &= not any(t.HasField("contents") for t in tensors)
    assert read_alike(is_request, message.SerializeToString()) == plain


@settings(max_examples=300)
@given(requests | responses, st.integers(0, 2**32), st.booleans())
def test_a_damaged_message_is_read_alike_or_left_to_the_library(message, seed, cut):
    damaged = bytearray(message.SerializeToString())
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 4)):
        if damaged:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    if cut:
        del damaged[rng.randrange(len(damaged) + 1) :]
    for is_request in (True, False):
        read_alike(is_request, bytes(damaged))


@settings(max_examples=100)
@given(requests | responses)
def test_what_either_writes_the_other_reads(message):
    is_request = isinstance(message, Request)
    model, version, request_id, held, tensors, _, raws = wire_library.decode_infer(
        is_request, message.SerializeToString()
    )
    parts = is_request, model, version, request_id, held, tensors, raws
    written = native.encode_infer(*parts)
    plain = {type(value) for value in held.values()} | {
        type(value) for tensor in tensors for value in tensor[3].values()
    } <= {bool, int, str, float, type(None)}
    assert (written is not None) == plain
    if written is not None:
        library = wire_library.encode_infer(*parts)
        kind = Request if is_request else Response
        assert kind.FromString(written) == kind.FromString(library)


@pytest.mark.parametrize(
    "twice",
    [
        pb.ModelInferRequest(model_name="other"),
        pb.ModelInferRequest(id="\N{GREEK SMALL LETTER PI}"),
        pb.ModelInferRequest(parameters={"a": pb.InferParameter(int64_param=2)}),
    ],
    ids=["model", "id", "parameter"],
)
def test_a_field_given_twice_has_the_last_value(twice):
    once = pb.ModelInferRequest(model_name="m", id="r")
    once.parameters["a"].int64_param = 1
    message = once.SerializeToString() + twice.SerializeToString()
    found = wire.decode_request(message)
    parsed = pb.ModelInferRequest.FromString(message)
    assert (found.model, found.request_id) == (parsed.model_name, parsed.id)
    assert found.parameters["a"] == parsed.parameters["a"].int64_param


def test_any_layout_and_byte_order_is_sent_as_row_major_little_endian():
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    (raw,) = wire.decode_request(wire.encode_request("m", {"t": array})).raws
    assert np.frombuffer(raw, "<i4").tolist() == [0, 3, 1, 4, 2, 5]


def test_fields_out_of_order_and_unknown_ones_are_read():
    first = pb.ModelInferRequest(raw_input_contents=[b"ab"]).SerializeToString()
    # Field 100 as varint, fixed64, bytes and fixed32, then field 1 and field 7 again.
    unknown = b"\xa0\x06\x96\x01\xa1\x06" + bytes(8) + b"\xa2\x06\x01z\xa5\x06" + bytes(4)
    last = pb.ModelInferRequest(model_name="m", raw_input_contents=[b""]).SerializeToString()
    found = wire.decode_request(first + unknown + last)
    assert found.model == "m"
    assert [bytes(raw) for raw in found.raws] == [b"ab", b""]


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_garbage_is_refused_or_is_a_message(garbage):
    try:
        found = wire.decode_request(garbage)
    except wire.WireError:
        return
    parsed = pb.ModelInferRequest.FromString(garbage)
    assert [bytes(raw) for raw in found.raws] == list(parsed.raw_input_contents)
    assert found.model == parsed.model_name


#: Pieces of messages: tags (long ones too), groups and their ends, texts, fields.
pieces = st.sampled_from(
    [
        b"\x0a", b"\x01", b"m", b"\x00", b"\x80", b"\x22", b"\x2a", b"\x2a\x03\x0a\x01x",
        b"\x3a\x02rr", b"\x2a\x02\x2a\x00", b"\x08\x01", b"\x0d1234", b"\x0912345678",
        b"\x0b", b"\x0c", b"\xa3\x06", b"\xa4\x06", b"\xa0\x06\x05", b"\xff\xff\xff\xff\x0f",
        b"\x8a\x80\x80\x80\x00\x01n", b"\x8a\x80\x80\x80\x80\x00\x01n",
    ]
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.lists(pieces | st.binary(max_size=2), max_size=8).map(b"".join), st.booleans())
def test_pieces_are_a_message_exactly_where_the_library_says_so(message, is_request):
    def accepted(parse):
        try:
            return parse(message) is not None
        except Exception:
            return False

    kind = pb.ModelInferRequest if is_request else pb.ModelInferResponse
    read_alike(is_request, message)
    assert accepted(lambda m: wire_library.decode_infer(is_request, m)) == accepted(kind.FromString)


def test_every_truncation_of_a_message_is_refused_or_is_a_message():
    message = wire.encode_request("gcn", {"x": np.zeros((200, 2), np.float32)}, request_id="r")
    complete = 0
    for end in range(len(message)):
        try:
            wire.decode_request(message[:end])
            complete += 1
        except wire.WireError:
            continue
    assert complete < 10  # only where a field happens to end


def test_response_round_trip():
    array = np.array([[1, 2], [3, 4]], np.float32)
    told = {"qos_violated": True, "lane": 4, "share": 0.5}
    message = wire.encode_response(
        "gcn", {"output": array}, version="3", request_id="r", parameters=told
    )
    assert pb.ModelInferResponse.FromString(message).raw_output_contents == [array.tobytes()]
    found = wire.decode_response(message)
    assert (found.model, found.version, found.request_id) == ("gcn", "3", "r")
    assert found.parameters == told
    assert found.parameters["qos_violated"] is True
    np.testing.assert_array_equal(found.outputs["output"], array)


def test_a_parameter_that_holds_nothing_is_an_empty_text_in_an_answer():
    answer = pb.ModelInferResponse(parameters={"p": pb.InferParameter()})
    assert wire.decode_response(answer.SerializeToString()).parameters == {"p": ""}


@pytest.mark.parametrize(
    ("datatype", "shape", "raws", "says"),
    [
        ("FP32", [3], [b"1234"], "output 'o'"),
        ("BYTES", [1], [b"1234"], "cannot read datatype 'BYTES'"),
        ("FP99", [1], [b"1234"], "cannot read datatype 'FP99'"),
        ("FP32", [1], [], "1 outputs but 0"),
    ],
)
def test_responses_that_make_no_sense_are_refused(datatype, shape, raws, says):
    answer = pb.ModelInferResponse(raw_output_contents=raws)
    answer.outputs.add(name="o", datatype=datatype, shape=shape)
    with pytest.raises(wire.WireError, match=says):
        wire.decode_response(answer.SerializeToString())


def test_stream_messages_hold_an_answer_or_a_failure():
    response = pb.ModelInferResponse(model_name="gcn", id="r").SerializeToString()
    message = wire.encode_stream_answer(response)
    parsed = pb.ModelStreamInferResponse.FromString(message)
    assert (parsed.error_message, parsed.infer_response.id) == ("", "r")
    assert wire.decode_stream_answer(message) == wire.decode_response(response)

    failure = wire.Failure("no", "r", {"status": "NOT_FOUND", "retry_after_ms": 3})
    message = wire.encode_stream_answer(failure)
    assert pb.ModelStreamInferResponse.FromString(message).error_message == "no"
    assert wire.decode_stream_answer(message) == failure
    assert "empty" in wire.decode_stream_answer(b"").message


def test_types_that_have_no_place_on_the_wire_are_refused():
    with pytest.raises(wire.WireError, match="complex64"):
        wire.encode_request("m", {"t": np.zeros(1, np.complex64)})
    with pytest.raises(wire.WireError, match="not list"):
        wire.encode_request("m", {}, parameters={"p": []})
    with pytest.raises(wire.WireError, match="not Decimal"):
        wire.encode_response("m", {}, parameters={"p": Decimal(1)})
