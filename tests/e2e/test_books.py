"""Nothing is lost from the books: the report counts every call that clients sent.

    BOOKS_S=60 pytest tests/e2e/test_books.py

asks for a minute instead of three seconds.
"""

import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.kit.http2_frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    frame,
    head_block,
    prefixed,
    reset,
    window,
)
from bench.kit.servers import ServerProcess
from serve.native import front_lacks
from serve.obs.report import load_report
from serve.wire.messages import INFER_METHOD, encode_request
from tests.e2e.support import random_graph
from tests.rpc.http2 import Http2, is_over

SECONDS = float(os.environ.get("BOOKS_S", "3"))
#: Together more than eight times what the queue takes.
SENDERS, BURST, QUEUE = 8, 24, 16
MESSAGE = encode_request("gcn", random_graph(40, 200).tensors)
#: How calls are made, and how often: whole ones, those with little time, cancelled ones, rubbish.
KINDS = {"whole": 16, "hurried": 4, "cancelled": 1, "unread": 1, "cut": 1, "rubbish": 1}
GONE = ("hurried", "cancelled", "unread", "cut")


def burst(connection, first, draw):
    """Send calls as fast as they can be written; returns the kinds, once all are over."""
    sent, frames = Counter(), []
    waited = []
    for stream in range(first, first + 2 * BURST, 2):
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        sent[kind] += 1
        more = (("grpc-timeout", f"{draw.choice((1, 5, 20))}m"),) if kind == "hurried" else ()
        frames.append(frame(HEADERS, END_HEADERS, stream, head_block(INFER_METHOD, *more)))
        message = prefixed(b"\x0a\xff" if kind == "rubbish" else MESSAGE)
        if kind == "cut":
            frames.append(frame(DATA, 0, stream, message[: len(message) // 2]))
        elif kind != "unread":
            half = len(message) // 2
            frames.append(frame(DATA, 0, stream, message[:half]))
            frames.append(frame(DATA, END_STREAM, stream, message[half:]))
        if kind in ("cancelled", "unread", "cut"):
            frames.append(reset(stream))
        else:
            waited.append(stream)
    connection.send(*frames)
    connection.read_until(lambda came: all(is_over(came, stream) for stream in waited))
    connection.came.clear()
    return sent


def send_for_a_while(port, seed, until):
    draw, sent = random.Random(seed), Counter()
    while time.monotonic() < until:
        # A connection that resets too many calls is ended by the server.
        with Http2(port) as connection:
            connection.send(window(0, 1 << 30))
            for number in range(10):
                sent += burst(connection, 1 + number * 2 * BURST, draw)
            connection.ping()
    return sent


@pytest.mark.parametrize("front", ["native", "python"])
def test_the_report_counts_every_call_that_was_sent(tmp_path, front):
    if front == "native" and (lacks := front_lacks()):
        pytest.skip(lacks)
    sections = {"server": {"front": front, "max_queue": QUEUE}, "models": {"load": ["gcn"]}}
    with ServerProcess(tmp_path, sections=sections) as server:
        until = time.monotonic() + SECONDS
        with ThreadPoolExecutor(SENDERS) as threads:
            running = [
                threads.submit(send_for_a_while, server.grpc_port, seed, until)
                for seed in range(SENDERS)
            ]
            sent = sum((one.result() for one in running), Counter())
    report = load_report(server.database)
    assert min(sent[kind] for kind in KINDS) > 0
    assert report.rejected["queue_full"] > 0
    lost = sum(sent.values()) - report.requests
    if front == "native":
        assert lost == 0, (sent, report.rejected)
        # What is cancelled at once may end before Python is told of it.
        unread = report.rejected["unread"] - sent["unread"] - sent["cut"]
        assert 0 <= unread <= sent["cancelled"]
        assert report.rejected["malformed"] == sent["rubbish"]
    else:
        # gRPC does not tell of calls that end before it hands them over.
        assert 0 <= lost <= sum(sent[kind] for kind in GONE), (sent, report.rejected)
