"""Recordings: what a reader makes of their lines, and the traces that follow from them."""

import msgspec
import pytest

from serve.errors import ConfigError
from serve.recording import (
    RecordedRequest,
    RecordingHeader,
    TrafficRecording,
    late_when_recorded,
    read_trace,
)
from serve.workload import Trace, TraceHeader

START_NS = 1_790_000_000_000_000_000
MS = 1_000_000
HEADER = RecordingHeader(started_unix_ns=START_NS)


def asked(at_ms, **fields):
    facts = {"model": "gcn", "nodes": 10, "edges": 21, "target_us": 5000}
    return RecordedRequest(at_ns=START_NS + round(at_ms * MS), **facts | fields)


def encoded(*requests):
    return b"".join(msgspec.json.encode(row) + b"\n" for row in (HEADER, *requests))


def test_requests_keep_their_times_and_what_they_asked():
    # Written in the order of their ends.
    data = encoded(asked(50.5, tenant="a", priority=3), asked(20, nodes=4), asked(80, model="gin"))
    trace = TrafficRecording.decode(data).trace()
    assert [item.offset_ns for item in trace.items] == [0, 30_500_000, 60 * MS]
    first, second, third = trace.items
    assert (first.num_nodes, first.num_edges, first.qos_target_us) == (4, 21, 5000)
    assert (second.tenant, second.priority, second.model) == ("a", 3, "gcn")
    assert third.model == "gin"
    assert trace.header.rate_hz == pytest.approx(50.0)
    assert Trace.decode(trace.encode()) == trace


@pytest.mark.parametrize("speed", [0.5, 2.0, 3.0])
def test_speed_divides_all_times(speed):
    trace = TrafficRecording.decode(encoded(asked(0), asked(10), asked(30))).trace()
    faster = trace.at_speed(speed)
    assert [one.offset_ns for one in faster.items] == [round(t * MS / speed) for t in (0, 10, 30)]
    assert faster.header.rate_hz == trace.header.rate_hz * speed
    assert [one.model for one in faster.items] == [one.model for one in trace.items]


def test_requests_by_ids_ask_for_as_many_ids_or_bring_their_sample():
    by_ids = {"graph": "g", "ids": 7, "nodes": 300, "edges": 900}
    recording = TrafficRecording.decode(
        encoded(
            asked(0),
            asked(1, **by_ids),
            asked(2, **by_ids | {"node_type": "paper", "fanouts": "4,2", "ids": 2}),
            asked(3, **by_ids | {"ids": 3}),
        )
    )
    trace = recording.trace()
    assert [item.dataset for item in trace.items] == ["recorded", "g", "g/paper?4,2", "g"]
    assert [item.num_nodes for item in trace.items] == [10, 7, 2, 3]
    plain, typed = trace.header.residents
    assert (plain.graph, plain.min_ids, plain.max_ids) == ("g", 3, 7)
    assert (typed.graph, typed.node_type, typed.fanouts) == ("g", "paper", "4,2")
    sampled = recording.trace(sampled=True)
    assert [item.num_nodes for item in sampled.items] == [10, 300, 300, 300]
    assert not sampled.header.residents


def test_a_line_that_is_being_written_is_left_out():
    data = encoded(asked(0), asked(1))
    assert len(TrafficRecording.decode(data + b'{"at_ns": 17').requests) == 2
    with pytest.raises(ConfigError, match="x, line 3: "):
        TrafficRecording.decode(encoded(asked(0)) + b'{"at_ns": 17}\n', "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty; a header line is wanted"),
        (encoded(), "it holds no request"),
        (b'{"format": "gnnserve-recording-9", "started_unix_ns": 0}\n', "is not 'gnnserve-rec"),
        (b"\x00\xff\n", "line 1: "),
    ],
)
def test_what_is_no_recording_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        TrafficRecording.decode(data)


def test_a_file_may_be_a_recording_or_a_trace(tmp_path):
    path = tmp_path / "file"
    late = {"late": True}
    path.write_bytes(encoded(asked(0, **late), asked(1), asked(2, **late, status="INTERNAL")))
    trace = read_trace(path)
    assert len(trace.items) == 3
    assert late_when_recorded(path) == 0.5
    Trace(TraceHeader(workload="gcn", seed=0, rate_hz=1.0), trace.items).save(path)
    assert read_trace(path).items == trace.items
    assert late_when_recorded(path) is None
    path.write_bytes(b'{"format": "other"}\n')
    with pytest.raises(ConfigError, match="line 1"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "absent")
