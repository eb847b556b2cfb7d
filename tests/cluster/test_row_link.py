"""A connection to a server that holds rows, where that server does what it should not."""

import threading
import time

import msgspec
import numpy as np
import pytest

zmq = pytest.importorskip("zmq", reason="ZeroMQ is not installed: pip install 'gnnserve[cluster]'")

from serve.cluster.row_link import Link  # noqa: E402
from serve.cluster.row_wire import RowsGiven  # noqa: E402
from serve.cluster.wanted_rows import WantedFeatures  # noqa: E402
from serve.core.cluster.rows import RowFetch, Stores  # noqa: E402
from serve.graphs.shared_column import RowsOf  # noqa: E402

MANY = 1000


class Flooding:
    """A socket on which answers to no question wait, many more than are read at once."""

    def __init__(self):
        self.left = MANY

    def recv_multipart(self, *_, copy):
        if not self.left:
            raise zmq.Again
        self.left -= 1
        return [zmq.Frame(msgspec.msgpack.encode(RowsGiven(99, "float32"))), zmq.Frame(b"")]


def test_a_server_that_floods_a_request_does_not_keep_it_from_its_clock():
    parts = np.zeros(1, np.uint16)
    wanted = WantedFeatures(RowsOf("g", b""), np.zeros(1, np.int64), parts, 1)
    fetch = RowFetch(Stores({"a:1": 0}), [0], time.monotonic_ns(), 10**9)
    wanted.pieces[0].number = 1
    with zmq.Context() as context:
        link, socket = Link(context, None, threading.Lock()), Flooding()
        link._receive(fetch, wanted, 0, socket, time.monotonic_ns())
    assert 0 < socket.left < MANY
    assert not fetch.done
