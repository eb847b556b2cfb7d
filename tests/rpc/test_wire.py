"""The codec against the protobuf library, both ways, and against garbage."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from serve import wire
from serve.pb import grpc_service_pb2 as pb

arrays = npst.arrays(
    dtype=st.sampled_from([k.dtype for k in wire.DATATYPES.values() if k.dtype]),
    shape=npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=300),
)


@settings(max_examples=50, deadline=None)
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
    # What the library writes, in its own order of fields, is read the same way.
    head, raws = wire.decode_request(parsed.SerializeToString())
    assert [bytes(raw) for raw in raws] == list(parsed.raw_input_contents)
    parsed.ClearField("raw_input_contents")
    assert head == parsed


def test_any_layout_and_byte_order_is_sent_as_row_major_little_endian():
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    raw = wire.decode_request(wire.encode_request("m", {"t": array}))[1][0]
    assert np.frombuffer(raw, "<i4").tolist() == [0, 3, 1, 4, 2, 5]


def test_fields_out_of_order_and_unknown_ones_are_read():
    first = pb.ModelInferRequest(raw_input_contents=[b"ab"]).SerializeToString()
    # Field 100 as varint, fixed64, bytes and fixed32, then field 1 and field 7 again.
    unknown = b"\xa0\x06\x96\x01\xa1\x06" + bytes(8) + b"\xa2\x06\x01z\xa5\x06" + bytes(4)
    last = pb.ModelInferRequest(model_name="m", raw_input_contents=[b""]).SerializeToString()
    head, raws = wire.decode_request(first + unknown + last)
    assert head.model_name == "m"
    assert [bytes(raw) for raw in raws] == [b"ab", b""]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_garbage_is_refused_or_is_a_message(garbage):
    try:
        head, raws = wire.decode_request(garbage)
    except wire.WireError:
        return
    parsed = pb.ModelInferRequest.FromString(garbage)
    assert [bytes(raw) for raw in raws] == list(parsed.raw_input_contents)
    assert head.model_name == parsed.model_name


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
    head = pb.ModelInferResponse(model_name="gcn", model_version="3", id="r")
    head.outputs.add(name="output", datatype="FP32", shape=[2, 2])
    wire.set_parameter(head.parameters["qos_violated"], True)
    wire.set_parameter(head.parameters["lane"], 4)
    wire.set_parameter(head.parameters["share"], 0.5)
    array = np.array([[1, 2], [3, 4]], np.float32)
    message = wire.encode_response(head, [array])
    assert pb.ModelInferResponse.FromString(message).raw_output_contents == [array.tobytes()]
    found = wire.decode_response(message)
    assert (found.model, found.version, found.request_id) == ("gcn", "3", "r")
    assert found.parameters == {"qos_violated": True, "lane": 4, "share": 0.5}
    assert found.parameters["qos_violated"] is True
    np.testing.assert_array_equal(found.outputs["output"], array)


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
    assert wire.get_parameter(pb.InferParameter()) == ""
