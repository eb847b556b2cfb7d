"""Limits of messages, and the cost of refusing what is beyond them."""

import time
import tracemalloc

import numpy as np
import pytest

from serve import native
from serve.errors import InvalidInput
from serve.pb import gnnserve_pb2 as own
from serve.pb import grpc_service_pb2 as pb
from serve.rpc import graph_update
from serve.rpc.graph_update import parse_update
from serve.wire import messages as wire
from serve.wire import protobuf as wire_library
from serve.wire.fields import prefix
from serve.wire.messages import WireError

MIB = 2**20
#: Field 100, which none of our messages has, as a varint and as a group.
UNKNOWN, GROUP = b"\xa0\x06\x00", b"\xa3\x06\xa4\x06"


def field(number, content):
    """Encode a length-delimited field."""
    return prefix(number, len(content)) + content


def tensor(content):
    return field(5, content)


#: Repeated pieces of messages that are large and yet almost empty.
HOLLOW = {
    "inputs": lambda size: b"\x2a\x00" * (size // 2),
    "outputs": lambda size: b"\x32\x00" * (size // 2),
    "raws": lambda size: b"\x3a\x00" * (size // 2),
    "parameters": lambda size: b"\x22\x00" * (size // 2),
    "unknown": lambda size: UNKNOWN * (size // 3),
    "groups": lambda size: GROUP * (size // 4),
    "one group": lambda size: b"\xa3\x06" + UNKNOWN * (size // 3) + b"\xa4\x06",
    "nested groups": lambda size: b"\xa3\x06" * (size // 2),
    "parameters of an input": lambda size: tensor(b"\x22\x00" * (size // 2)),
    "unknown in an input": lambda size: tensor(UNKNOWN * (size // 3)),
    "group in an input": lambda size: tensor(b"\xa3\x06" + UNKNOWN * (size // 3) + b"\xa4\x06"),
    "packed shape": lambda size: tensor(field(3, b"\x01" * size)),
    "shape": lambda size: tensor(b"\x18\x01" * (size // 2)),
    "numbers": lambda size: tensor(field(5, field(2, b"\x01" * size))),
    "numbers one by one": lambda size: tensor(field(5, b"\x10\x01" * (size // 2))),
    "contents in parts": lambda size: tensor(b"\x2a\x00" * (size // 2)),
    "texts": lambda size: tensor(field(5, b"\x42\x00" * (size // 2))),
    "name": lambda size: field(1, b"m" * size),
    "raws after a good start": lambda size: field(1, b"gcn") + b"\x3a\x00" * (size // 2),
}


@pytest.fixture
def unparsed(monkeypatch):
    """Fail when the protobuf library is called."""

    def parse(kind, message):
        raise AssertionError(f"{len(message)} bytes were parsed")

    monkeypatch.setattr(wire_library, "parse", parse)


@pytest.mark.parametrize("is_request", [True, False], ids=["request", "response"])
@pytest.mark.parametrize("made_of", HOLLOW)
def test_a_hollow_message_is_refused_before_anything_is_made_of_it(made_of, is_request, unparsed):
    message = HOLLOW[made_of](2 * MIB)
    decode = wire.decode_request if is_request else wire.decode_response
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=r"at most|the most") as caught:
            decode(message)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MIB
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("made_of", HOLLOW)
def test_to_refuse_a_larger_one_takes_no_longer(made_of):
    def best_s(size):
        message = HOLLOW[made_of](size)
        times = []
        for _ in range(5):
            began = time.thread_time()
            assert native.decode_infer(True, message) is None
            with pytest.raises(WireError):
                wire_library.decode_infer(True, message)
            times.append(time.thread_time() - began)
        return min(times)

    # 32 times the size; work in proportion would take 32 times the processor time.
    assert best_s(16 * MIB) < 10 * best_s(MIB // 2)


def request(**changed):
    """Encode a request at its limits, except for what is `changed`."""
    facts = {
        "inputs": 16,
        "outputs": 16,
        "raws": 16,
        "parameters": 40,
        "dims": 8,
        "name": "n" * 256,
    }
    facts |= changed
    name = facts["name"]
    message = pb.ModelInferRequest(model_name=name, model_version=name)
    for i in range(facts["inputs"]):
        message.inputs.add(name=f"x{i}", datatype="FP32", shape=[1] * facts["dims"])
    for i in range(facts["outputs"]):
        message.outputs.add(name=f"y{i}").parameters["p"].bool_param = True
    for i in range(facts["parameters"]):
        message.parameters[f"p{i}"].int64_param = i
    message.inputs[0].name = message.outputs[0].name = name
    for i in range(8):
        message.inputs[0].parameters[f"p{i}"].string_param = "text"
    message.raw_input_contents.extend([b"raw"] * facts["raws"])
    return message


def test_a_request_at_its_limits_is_read():
    message = request().SerializeToString()
    found = wire.decode_request(message)
    assert (len(found.inputs), len(found.outputs), len(found.raws)) == (16, 16, 16)
    assert len(found.inputs[0].shape) == 8
    assert native.decode_infer(True, message) is not None
    # This message takes the path through the protobuf library.
    assert wire.decode_request(message + UNKNOWN) == found


@pytest.mark.parametrize("more", [b"", UNKNOWN], ids=["plain", "not plain"])
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"inputs": 17}, "inputs: 17 are given, at most 16 are taken"),
        ({"outputs": 17, "parameters": 0}, "outputs: 17 are given, at most 16 are taken"),
        ({"raws": 17}, "raw contents: 17 are given, at most 16 are taken"),
        ({"parameters": 41}, "parameters: 65 are given, at most 64 are taken"),
        ({"dims": 9}, "dimensions of tensor 0: 9 are given, at most 8 are taken"),
        ({"name": "n" * 257}, "model_name: 257 bytes, at most 256 are taken"),
        ({"name": "π" * 129}, "model_name: 258 bytes, at most 256 are taken"),
    ],
)
def test_a_request_beyond_a_limit_is_refused_in_words(changed, says, more):
    message = request(**changed).SerializeToString() + more
    assert native.decode_infer(True, message) is None
    with pytest.raises(WireError) as caught:
        wire.decode_request(message)
    assert str(caught.value) == says


def test_large_tensors_are_no_head():
    raws = [bytes(MIB), bytes(3)]
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=raws).SerializeToString()
    for whole in (message, message + UNKNOWN, GROUP + message):
        assert [bytes(raw) for raw in wire.decode_request(whole).raws] == raws


def test_numbers_may_be_given_up_to_a_limit():
    def message(count):
        found = pb.ModelInferRequest(model_name="m")
        found.inputs.add(name="x", datatype="FP32", shape=[count]).contents.fp32_contents.extend(
            np.ones(count)
        )
        return found.SerializeToString()

    found = wire.decode_request(message(65_000))
    assert len(found.inputs[0].contents.fp32_contents) == 65_000
    with pytest.raises(WireError, match="bytes of numbers, at most 262144 are taken; give larger"):
        wire.decode_request(message(66_000))


@pytest.mark.parametrize(
    "made_of", [b"\x08\x00", b"\x1a\x00", b"\x52\x00", GROUP, field(3, b"\x10\x01" * MIB)]
)
def test_a_hollow_change_of_a_graph_is_refused_unparsed(made_of, monkeypatch):
    monkeypatch.setattr(graph_update, "parse", None)
    with pytest.raises(WireError, match="at most 16384 are taken"):
        parse_update(made_of * (1 + 2 * MIB // len(made_of)))


def test_a_large_change_of_a_graph_is_parsed():
    update = own.UpdateGraphRequest(graph="g")
    update.add_x.data = bytes(MIB)
    assert parse_update(update.SerializeToString()) == update
    with pytest.raises(WireError, match="malformed UpdateGraphRequest"):
        parse_update(b"\x0a\x01\xff")


def test_a_feature_without_rows_is_told_as_such():
    update = own.UpdateGraphRequest(graph="g")
    update.tensors.add(name="add_nodes.paper.x", datatype="FP32", data=bytes(4))
    with pytest.raises(InvalidInput, match=r"'add_nodes\.paper\.x': shape \[\], but at least one"):
        graph_update.decode_change(update)


@pytest.mark.parametrize(
    ("message", "is_read"),
    [
        (b"\x0a\x01m", True),
        (b"\x8a\x80\x80\x80\x00\x01m", True),
        (b"\x8a\x80\x80\x80\x80\x00\x01m", False),  # a tag of six bytes
        (b"\x8a\x80\x80\x80\x10\x01m", False),  # a tag of 33 bits
        (b"\x02\x00", False),  # a field 0
        (b"\x0a\x01m" + GROUP, True),
        (b"\x0a\x01m\xa3\x06\x0a\x01n\xa4\x06", True),
        (b"\x0b\x0c\x0a\x01m", True),
        (b"\xa3\x06\xab\x06\xac\x06\xa4\x06\x0a\x01m", True),
        (b"\xa3\x06\xab\x06\xa4\x06\xac\x06", False),
        (b"\xa3\x06", False),
        (b"\xa4\x06", False),
        (b"\x0e", False),
    ],
)
def test_strange_fields_are_read_as_the_library_reads_them(message, is_read):
    def read(parse):
        try:
            return parse(message)
        except Exception:
            return None

    found = read(wire.decode_request)
    assert (found is not None) == is_read
    if is_read:
        assert found.model == "m"
    assert (read(pb.ModelInferRequest.FromString) is not None) == is_read
