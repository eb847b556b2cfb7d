"""Gives other servers the rows that this one holds, and draws for them: one thread, one socket."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils import z85

from serve import native
from serve.cluster.change_wire import MARK
from serve.cluster.row_wire import (
    ID_DTYPES,
    MOST_BYTES,
    MOST_ID_BYTES,
    PIECE_BYTES,
    Keys,
    RowsAsked,
    RowsGiven,
    secure,
)
from serve.errors import ConfigError
from serve.graphs.csr import Ids
from serve.graphs.edges import Edges
from serve.graphs.shared_column import SharedColumn
from serve.graphs.shared_sampling import drawn
from serve.undecodable import UNDECODABLE

_log = logging.getLogger(__name__)

#: Answers that wait for one connection; who has more on the way loses them.
_MOST_WAITING = 8
#: Larger answers are sent from where they are.
_COPIED_BYTES = 64 << 10
_ID_BYTES, _LENGTH_BYTES = 8, 4
#: A version is given for so long after the next one came, and those before the newest while what
#: each has of its own takes no more than this, or than that share of the newest.
_KEPT_S, _KEPT_BYTES, _KEPT_SHARE = 2.0, 64 << 20, 1 / 4
_LATER = "has not made the same changes"
#: Where libzmq asks whether a key is one that may connect (ZeroMQ RFC 27).
_ZAP = "inproc://zeromq.zap.01"
_STOP, _CHANGES = "inproc://stop", "inproc://changes"
#: Messages about changes that wait for their thread, and answers of it; more are lost.
_MOST_MESSAGES = 8


class _Held(NamedTuple):
    """A version of a graph, which is given until it is too old."""

    column: SharedColumn
    until_s: float
    #: Of the nodes that are here; None where every server has all.
    edges: Edges | None = None

    def own_bytes(self, after: "_Held") -> int:
        """Return the memory that only this version of the two takes."""
        found = self.column.own_bytes(after.column)
        if self.edges is not None and after.edges is not None:
            found += self.edges.own_bytes(after.edges)
        return found


class RowStore:
    """Answers asks for rows until it is stopped."""

    def __init__(self, listen: str, keys: Keys | None) -> None:
        """Listen at `host:port`; raises ConfigError. Without `keys` everybody is heard."""
        self._context = zmq.Context()
        self._keys = keys
        #: By graph, the versions that are given: by their changes, the newest last.
        self._versions: dict[str, dict[bytes, _Held]] = {}
        #: Asks by what became of them, and rows and bytes that were given.
        self.counts: Counter[str] = Counter(
            dict.fromkeys(("given", "late", "refused", "rows", "bytes"), 0)
        )
        # Of these, the thread alone uses all but `_wake`.
        self._socket = self._context.socket(zmq.ROUTER)
        self._gate = self._context.socket(zmq.REP)
        self._stop = self._context.socket(zmq.PAIR)
        self._wake = self._context.socket(zmq.PAIR)
        self._changes = self._context.socket(zmq.PAIR)
        self._changes.sndhwm = self._changes.rcvhwm = _MOST_MESSAGES
        self._changes.bind(_CHANGES)
        self._stop.bind(_STOP)
        self._wake.connect(_STOP)
        self._gate.bind(_ZAP)
        secure(self._socket, keys, listens=True)
        self._socket.sndhwm = self._socket.rcvhwm = _MOST_WAITING
        if keys is not None:
            self._socket.zap_domain = b"rows"
        try:
            self._socket.bind(f"tcp://{listen}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cluster.rows.listen: {listen}: {error.strerror}") from error
        bound = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.port = int(bound.rpartition(":")[2])
        self._thread = threading.Thread(target=self._run, name="rows", daemon=True)

    def hold(self, column: SharedColumn, edges: Edges | None) -> None:
        """Give rows of that version from now on, and of those before while requests may need them.

        With `edges`, those of the nodes that are here, draw for others. For one thread at a time.
        """
        of_rows, now_s = column.of_rows, time.monotonic()
        kept = [
            held._replace(until_s=min(held.until_s, now_s + _KEPT_S))
            for changes, held in self._versions.get(of_rows.graph, {}).items()
            if held.until_s > now_s and changes != of_rows.changes
        ]
        newest = _Held(column, math.inf, edges)
        versions = [*_affordable(kept, newest), newest]
        # The thread that answers reads what it was before or what it is after.
        self._versions[of_rows.graph] = {one.column.of_rows.changes: one for one in versions}

    def changes(self) -> "zmq.Socket[bytes]":
        """Return the end of a pair to which messages about changes go, see ``change_wire``.

        What comes from it goes to the connection that its first frame names. To be closed before
        this store is stopped.
        """
        socket = self._context.socket(zmq.PAIR)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = _MOST_MESSAGES
        socket.connect(_CHANGES)
        return socket

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer nothing any more. Idempotent."""
        if self._context.closed:
            return
        if self._thread.is_alive():
            self._wake.send(b"")
            self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._gate, self._stop, self._changes):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                return
            if self._gate in ready:
                self._admit()
            if self._changes in ready:
                self._socket.send_multipart(self._changes.recv_multipart())
            if self._socket in ready:
                # NOTE: a message that cannot be answered must not end the thread.
                try:
                    self._answer()
                except Exception:
                    _log.exception("an ask for rows was not answered")

    def _admit(self) -> None:
        """Tell libzmq whether the key of a connection is ours."""
        version, request_id, _, _, _, mechanism, *rest = self._gate.recv_multipart()
        expected = None if self._keys is None else [z85.decode(self._keys.public)]
        allowed = mechanism == b"CURVE" and rest == expected
        status = [b"200", b"OK"] if allowed else [b"400", b"another key"]
        self._gate.send_multipart([version, request_id, *status, b"", b""])

    def _answer(self) -> None:
        """Read a message and answer it, unless it is none of ours."""
        identity, *frames = self._socket.recv_multipart()
        if frames[0] == MARK:
            with suppress(zmq.Again):
                self._changes.send_multipart([identity, *frames[1:]], zmq.NOBLOCK)
            return
        try:
            head, ids = frames
            asked = msgspec.msgpack.decode(head, type=RowsAsked)
        except (ValueError, *UNDECODABLE):
            self.counts["refused"] += 1
            return
        found = self._rows(asked, ids)
        if isinstance(found, str):
            later = found == _LATER
            self.counts["late" if later else "refused"] += 1
            given = msgspec.msgpack.encode(RowsGiven(asked.number, "", found, later))
            self._socket.send_multipart([identity, given, b""])
            return
        size_bytes = sum(array.nbytes for array in found)
        self.counts["given"] += 1
        self.counts["rows"] += len(found[0])
        self.counts["bytes"] += size_bytes
        given = msgspec.msgpack.encode(RowsGiven(asked.number, found[-1].dtype.name))
        message: list[bytes | memoryview] = [identity, given]
        message += [array.data if array.size else b"" for array in found]
        self._socket.send_multipart(message, copy=size_bytes <= _COPIED_BYTES)

    def _rows(self, asked: RowsAsked, ids: bytes) -> tuple[NDArray[Any], ...] | str:
        """Return the arrays of the rows that are asked for, or why there are none."""
        if len(ids) % _ID_BYTES or len(ids) > MOST_ID_BYTES:
            return f"was sent {len(ids)} bytes of ids"
        versions = self._versions.get(asked.graph)
        if versions is None:
            return f"does not hold graph '{asked.graph}'"
        newest = next(reversed(versions.values())).column
        if newest.of_rows.files != asked.files:
            return f"holds another graph '{asked.graph}', or other parts of it"
        held = versions.get(asked.changes)
        if held is None:
            return _LATER
        nodes = np.frombuffer(ids, np.int64)
        return _features(held, nodes) if asked.fanout == 0 else _draws(held, nodes, asked)


def _features(held: _Held, nodes: Ids) -> tuple[NDArray[Any], ...] | str:
    column = held.column
    if nodes.size * column.shape[0] * column.dtype.itemsize > MOST_BYTES:
        return f"was asked for {nodes.size} rows, more than a message holds"
    rows = column.rows_here(nodes)
    return (rows,) if rows is not None else _elsewhere(held)


def _draws(held: _Held, nodes: Ids, asked: RowsAsked) -> tuple[NDArray[Any], ...] | str:
    """Return lengths and ids of what the first of the nodes draw, as many as a message holds."""
    edges, every = held.edges, native.ALL_NEIGHBOURS
    if edges is None:
        return f"has all edges of graph '{asked.graph}', and draws for itself alone"
    if not (asked.fanout > 0 or asked.fanout == every):
        return f"was asked for draws of {asked.fanout}"
    if not nodes.size or np.unique(nodes).size != nodes.size:
        return "was asked for draws of no nodes, or of one twice"
    if not held.column.all_here(nodes):
        return _elsewhere(held)
    dtype = np.dtype(ID_DTYPES[edges.num_nodes > 1 << 31])
    counts = edges.degrees(nodes)
    if asked.fanout != every:
        counts = np.minimum(counts, asked.fanout)
    if counts.max() * dtype.itemsize > MOST_BYTES - 2 * PIECE_BYTES:
        return f"has a node that draws {counts.max()} others, more than a message holds"
    ends_bytes = np.cumsum(_LENGTH_BYTES + counts * dtype.itemsize)
    first = nodes[: 1 + int(np.searchsorted(ends_bytes, PIECE_BYTES))]
    rows = drawn(edges, first, asked.fanout, asked.hop_seed % 2**64)
    return rows.lengths.astype(np.int32), rows.values.astype(dtype)


def _elsewhere(held: _Held) -> str:
    return f"holds part {held.column.source.part}, and was asked for rows of another"


def _affordable(older: Sequence[_Held], newest: _Held) -> list[_Held]:
    """Return the latest of the older versions whose memory is within its bound, in their order."""
    left_bytes = max(_KEPT_BYTES, int(_KEPT_SHARE * newest.column.nbytes))
    found, after = [], newest
    for held in reversed(older):
        left_bytes -= held.own_bytes(after)
        if left_bytes < 0:
            break
        found.append(held)
        after = held
    return found[::-1]
