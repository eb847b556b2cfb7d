"""The writer of recordings: what it keeps, how much, and who may read it."""

import logging
import stat

import pytest

from serve.errors import ConfigError
from serve.obs.recorder import TrafficRecorder
from serve.recording import TrafficRecording, read_trace
from tests.obs.builders import MS, START_UNIX_NS, record


@pytest.fixture
def path(tmp_path):
    return tmp_path / "requests.jsonl"


def recorder(path, share=1.0, most_bytes=2**20):
    return TrafficRecorder(path, share, most_bytes, START_UNIX_NS)


def test_sizes_and_times_come_back(path):
    writer = recorder(path)
    writer.write(record(request_uid="b", arrived_unix_ns=START_UNIX_NS + 7 * MS, tenant="t"))
    writer.write(
        record(request_uid="a", arrived_unix_ns=START_UNIX_NS, graph="g", num_ids=5, fanouts="3,2")
    )
    writer.close()
    writer.close()
    by_ids, brought = TrafficRecording.decode(path.read_bytes()).requests
    assert (by_ids.uid, by_ids.graph, by_ids.ids, by_ids.fanouts) == ("a", "g", 5, "3,2")
    assert (brought.uid, brought.tenant, brought.nodes, brought.edges) == ("b", "t", 1000, 8000)
    assert brought.latency_us == 10_000
    assert [item.offset_ns for item in read_trace(path).items] == [0, 7 * MS]


def test_what_never_had_a_size_is_left_out(path):
    writer = recorder(path)
    writer.write(record(num_nodes=0, num_edges=0, status="NOT_FOUND"))
    writer.write(record())
    writer.close()
    assert len(TrafficRecording.decode(path.read_bytes()).requests) == 1


def test_the_file_is_new_and_for_this_user_alone(path):
    path.write_text("what was here before")
    path.chmod(0o644)
    recorder(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"before" not in path.read_bytes()


def test_it_ends_when_it_is_full_and_says_so_once(path, caplog):
    writer = recorder(path, most_bytes=1000)
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            writer.write(record(request_uid=f"r{number}"))
    writer.close()
    kept = len(TrafficRecording.decode(path.read_bytes()).requests)
    assert 0 < kept < 50
    assert writer.lost == 50 - kept
    assert path.stat().st_size <= 1000
    assert [one.message for one in caplog.records] == [
        f"recording {path} ends here: it has reached report.record_size"
    ]


def test_a_share_is_recorded_and_joint_requests_whole(path):
    writer = recorder(path, share=0.3)
    for number in range(1000):
        for part in "ab":
            writer.write(record(request_uid=f"{number}{part}", joint_uid=f"j{number}"))
    writer.close()
    joints = [one.joint for one in TrafficRecording.decode(path.read_bytes()).requests]
    assert 200 < len(set(joints)) < 400
    assert all(joints.count(one) == 2 for one in set(joints))


def test_a_full_disk_ends_it(path, caplog, monkeypatch):
    writer = recorder(path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("serve.obs.recorder.os.write", full)
    with caplog.at_level(logging.WARNING):
        writer.write(record())
        writer.write(record())
    writer.close()
    assert writer.lost == 2
    assert [one.message for one in caplog.records] == [
        f"recording {path} ends here: No space left on device"
    ]


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"report.record: .*cannot be written"):
        recorder(tmp_path / "absent" / "file")
