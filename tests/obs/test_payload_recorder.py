"""The writer of payloads: what it keeps, how much, who may read it, and how it is read."""

import logging
import stat

import numpy as np
import pytest

from serve.config import load_config
from serve.errors import ConfigError
from serve.obs.payload_recorder import PayloadRecorder
from serve.payloads import Payloads, beside
from serve.wire.messages import decode_request, encode_request


@pytest.fixture
def path(tmp_path):
    return beside(tmp_path / "requests.jsonl")


def request(seed, nodes=3):
    rng = np.random.default_rng(seed)
    tensors = {
        "x": rng.random((nodes, 4), np.float32),
        "edge_index": rng.integers(0, nodes, (2, 5)),
    }
    return decode_request(encode_request("gcn", tensors))


def contents(found):
    return [bytes(raw) for raw in found.raws]


def test_payloads_come_back_and_equal_ones_take_no_room(path):
    assert path.name == "requests.jsonl.payloads"
    writer = PayloadRecorder(path, 1.0, 2**20)
    for number in range(5):
        writer.write(f"u{number}", request(number % 2))
    size = path.stat().st_size
    writer.write("u5", request(1))
    assert path.stat().st_size - size < 100
    writer.close()
    writer.close()
    found = Payloads.open(path)
    assert set(found.places) == {f"u{number}" for number in range(6)}
    for number in range(5):
        again = found.request(f"u{number}")
        assert contents(again) == contents(request(number % 2))
        assert [one.name for one in again.inputs] == ["x", "edge_index"]
    assert found.places["u0"] == found.places["u2"] == found.places["u4"]
    assert found.header.redacted == ()


def test_redacted_inputs_are_zeros_and_the_file_says_so(path):
    writer = PayloadRecorder(path, 1.0, 2**20, ["x"])
    writer.write("u", request(1))
    writer.close()
    found = Payloads.open(path)
    assert found.header.redacted == ("x",)
    x, edges = contents(found.request("u"))
    assert x == bytes(3 * 4 * 4)
    assert edges == contents(request(1))[1]
    assert contents(request(1))[0] not in path.read_bytes()


def test_the_file_is_new_and_for_this_user_alone(path):
    path.write_text("what was here before")
    path.chmod(0o644)
    PayloadRecorder(path, 1.0, 2**20).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"before" not in path.read_bytes()


def test_it_ends_when_it_is_full_and_says_so_once(path, caplog):
    writer = PayloadRecorder(path, 1.0, 2000)
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            writer.write(f"u{number}", request(number))
    writer.close()
    kept = len(Payloads.open(path).places)
    assert 0 < kept < 50
    assert writer.lost == 50 - kept
    assert path.stat().st_size <= 2000
    assert [one.message for one in caplog.records] == [
        f"recording of payloads {path} ends here: it has reached report.record_payloads_size"
    ]


def test_a_payload_that_is_being_written_is_left_out(path):
    writer = PayloadRecorder(path, 1.0, 2**20)
    writer.write("whole", request(1))
    writer.write("cut", request(2))
    writer.close()
    data = path.read_bytes()
    for cut in (1, 30, 80):
        path.write_bytes(data[:-cut])
        assert set(Payloads.open(path).places) == {"whole"}


def test_a_share_is_the_same_as_in_the_recording(path):
    writer = PayloadRecorder(path, 0.3, 2**20)
    for number in range(300):
        writer.write(f"{number}a", request(1), f"j{number}")
        writer.write(f"{number}b", request(2), f"j{number}")
    writer.close()
    found = {uid[:-1] for uid in Payloads.open(path).places}
    assert 40 < len(found) < 150
    assert set(Payloads.open(path).places) == {f"{one}{part}" for one in found for part in "ab"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "line 1"),
        (b'{"format":"other"}\n', "format 'other' is not"),
        (b'{"format":"gnnserve-payloads-1"}\n{"uid":"a","same_as":"b"}\n', "there is no request b"),
        (b'{"format":"gnnserve-payloads-1"}\n{"uid":"a","size_bytes":-1}\n', "line 2"),
    ],
)
def test_a_file_of_something_else_is_told(path, data, told):
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=told):
        Payloads.open(path)


def test_what_cannot_be_written_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"report\.record_payloads: .*cannot be written"):
        PayloadRecorder(tmp_path / "absent" / "file", 1.0, 100)


def test_payloads_need_a_recording(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text("[report]\nrecord_payloads = true\n")
    with pytest.raises(ConfigError, match=r"record_payloads: payloads lie beside a recording"):
        load_config(file)
