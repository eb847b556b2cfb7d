"""docs/limits.md: every limit has the key, the default and the counter that the page says."""

import re

import grpc
import pytest

from bench.kit.result import ROOT
from serve.config import ServerConfig
from serve.config_schema import schema
from serve.core.types import RejectReason
from serve.obs import http
from serve.obs.explanations import REASONS as REPORTED
from serve.rest import connections, counts, feed, run
from serve.rpc import native_front, stream, thread_pools
from serve.rpc.call_threads import MAX_PARSED_BYTES
from serve.rpc.refusals import FRONT_REASONS, REASONS
from serve.server.regions import MAX_REGIONS, MAX_REGIONS_OF_PRINCIPAL
from serve.server.training.trainer import MOST_JOBS
from serve.wire import protobuf
from tests.docs.pages import PAGES

PAGE = PAGES["docs/limits.md"]
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| limit")
]
KIB, MIB = 1 << 10, 1 << 20
#: By how a row begins: the limit in the code, of those that have no key.
FIXED = {
    "calls of a connection": thread_pools.ThreadPools(100).calls_of_a_connection - 2 * 100,
    "calls with a thread": thread_pools._SPARE_THREADS,
    "health and metadata": thread_pools._PROBE_THREADS,
    "loads, graph updates": thread_pools._ADMIN_THREADS,
    "open `ModelStreamInfer`": thread_pools.MAX_STREAMS,
    "unanswered requests of one": stream.WINDOW,
    "open `Watch`": thread_pools.MAX_WATCHERS,
    "open reflection": thread_pools.MAX_REFLECTIONS,
    "calls that wait for a training job": thread_pools.MAX_JOB_WATCHERS,
    "message of methods": MAX_PARSED_BYTES,
    "training jobs": MOST_JOBS,
    "inputs of": protobuf.MOST_TENSORS,
    "outputs that": protobuf.MOST_TENSORS,
    "parameters": protobuf.MOST_PARAMETERS,
    "dimensions": protobuf.MOST_DIMENSIONS,
    "length of a name": protobuf.MOST_NAME_BYTES,
    "everything but": protobuf.MOST_HEAD_BYTES,
    "tensor contents as numbers": protobuf.MOST_TYPED_BYTES,
    "time without reading": native_front._SEND_TIMEOUT_S,
    "regions": MAX_REGIONS,
    "those of one": MAX_REGIONS_OF_PRINCIPAL,
    "HTTP connections": connections.MOST_CONNECTIONS,
    "bytes of all HTTP": run._HELD_MESSAGES,
    "time to read each MiB": connections.SEND_S,
    "reports over HTTP": http._MOST_REPORTS,
    "pages that watch": feed.MOST_WATCHERS,
    "questions of live pages": feed.MOST_QUESTIONS,
}
#: Limits of compiled code: how a row begins, the file, and what stands in it.
COMPILED = {
    "headers of a call": ("connection.hpp", "header_bytes = 16 << 10"),
    "content-type": ("grpc_head.cpp", 'kContentType = "application/grpc"'),
    "resets": ("connection.cpp", "kResetBurst = 1000, kResetsPerSecond = 200"),
    "pings": ("connection.cpp", "kControlBurst = 1000, kControlPerSecond = 33"),
    "time that the server gives": ("front.hpp", "kHandshakeBurst_s = 0.1, kHandshakeShare = 0.25"),
}
#: Defaults that depend on something, as the page words them.
DECIDED = {
    "max_run_s": ("60 s or 200 × its estimate",),
    "max_receiving": ("4 M", "4 M, at least 64 MiB"),
    "max_receiving_of_connection": ("half of that",),
}
#: What limits nothing by a number.
OTHER = ("memory of a run", "message of a call whose", "requests of a tenant", "POST requests")


def number(text):
    """Return the last number of a default, with its unit: bytes, seconds or a count."""
    value, unit = re.findall(r"([\d,]+) ?(KiB|MiB|M\b)?", text)[-1]
    return int(value.replace(",", "")) * {"KiB": KIB, "MiB": MIB}.get(unit, 1)


def test_limits_of_memory_follow_the_largest_message():
    server = ServerConfig(max_message="100 MiB")
    assert server.max_receiving_bytes == 4 * 100 * MIB
    assert server.max_receiving_bytes_of_connection == 2 * 100 * MIB
    assert ServerConfig(max_message="1 MiB").max_receiving_bytes == 64 * MIB


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:30])
def test_a_row_is_true(row):
    limit, default, key, seen, counter = row
    keys = re.findall(r"`server\.(\w+)`", key)
    if keys:
        (name,) = keys
        told = schema()["properties"]["server"]
        told = schema()["$defs"].get("ServerConfig", told)["properties"][name]["default"]
        assert told == getattr(ServerConfig(), name)
        if told is None:
            assert default in DECIDED[name]
        elif isinstance(told, str):
            assert default == told
        else:
            assert number(default) == told
    elif starts := [one for one in COMPILED if limit.startswith(one)]:
        file, text = COMPILED[starts[0]]
        assert text in (ROOT / "csrc" / "front" / file).read_text()
    elif not limit.startswith(OTHER):
        (start,) = [one for one in FIXED if limit.startswith(one)]
        first = re.sub(r", at least.*", "", default)
        assert number(first) == FIXED[start]
    codes = re.findall(r"\b[A-Z]+_[A-Z_]+\b", seen)
    assert all(hasattr(grpc.StatusCode, code) for code in codes)
    for reason in re.findall(r"`([\w:]+)`", counter):
        kind, _, name = reason.rpartition(":")
        known = {
            "": {*REASONS, *FRONT_REASONS},
            "rest": set(counts._REASONS),
            "report": {one.value for one in RejectReason} | set(REPORTED),
        }
        assert name in known[kind]


def test_no_limit_is_missing():
    for names in (FIXED, COMPILED):
        for start in names:
            assert sum(row[0].startswith(start) for row in ROWS) == 1, start
    keys = {name for row in ROWS for name in re.findall(r"`server\.(\w+)`", row[2])}
    limits = {name for name in ServerConfig.__struct_fields__ if name.startswith("max_")}
    assert keys == limits | {"receive_timeout_s"}
    counted = set(re.findall(r"`([\w:]+)`", " ".join(row[4] for row in ROWS)))
    assert {*REASONS, *FRONT_REASONS} - counted == {"unread"}
    assert {f"rest:{reason}" for reason in counts._REASONS} <= counted
