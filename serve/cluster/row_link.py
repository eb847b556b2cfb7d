"""Connections to the servers that hold rows, used by one request at a time."""

import math
import threading
import time

import msgspec
import zmq

from serve.cluster.row_wire import Keys, RowsGiven, secure
from serve.cluster.wanted_rows import WantedRows
from serve.core.cluster.rows import RowFetch, Store
from serve.undecodable import UNDECODABLE

#: A connection that ended is noticed within this time.
_LOOK_MS = 5
#: Answers that are taken in before they are read.
_MOST_WAITING = 8
#: A store that has yet to make a change is asked again after this time.
_AGAIN_MS = 1
_ENDED = "ended the connection"


class Link:
    """A connection to each server that was asked once. Not thread-safe."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        keys: Keys | None,
        lock: threading.Lock,
    ) -> None:
        """`lock` guards what requests have in common: who failed, and who has how much to do."""
        self._context = context
        self._keys = keys
        self._lock = lock
        self._sockets: dict[Store, zmq.Socket[bytes]] = {}
        self._numbers = 0
        #: Stores that were connected to.
        self._reached: set[Store] = set()
        #: Bytes of rows that came.
        self.received_bytes = 0

    def close(self) -> None:
        """End all connections. Idempotent."""
        for store in list(self._sockets):
            self._drop(store)

    def leave_gone(self) -> None:
        """End the connections to stores that are gone."""
        for store in [store for store in self._sockets if store.gone]:
            self._drop(store)

    def ask(self, fetch: RowFetch, wanted: WantedRows) -> None:
        """Ask whom `fetch` names, without waiting; `collect` does the rest."""
        for part in wanted.pieces:
            self._send(fetch, wanted, part)

    def collect(self, fetch: RowFetch, wanted: WantedRows) -> None:
        """Give `wanted` the rows as they come, until `fetch` is done."""
        while not fetch.done:
            now_ns = time.monotonic_ns()
            for part in fetch.overdue(now_ns):
                piece = wanted.pieces[part]
                silent = "did not answer" if piece.number else "could not be reached"
                self._failed(fetch, wanted, part, piece.told or f"{silent} in time", now_ns)
            if fetch.done:
                return
            self._wait(fetch, wanted, now_ns)
            now_ns = time.monotonic_ns()
            for part, piece in list(wanted.pieces.items()):
                store = fetch.asked(part)
                if store is None:
                    continue
                socket = self._socket(store)
                if not piece.number:
                    if piece.again_ns <= now_ns:
                        self._send(fetch, wanted, part)
                elif not socket.getsockopt(zmq.EVENTS):
                    self._failed(fetch, wanted, part, _ENDED, now_ns)
                else:
                    self._receive(fetch, wanted, part, socket, now_ns)

    def _wait(self, fetch: RowFetch, wanted: WantedRows, now_ns: int) -> None:
        """Wait until a socket can do what is wanted of it, or it is time to look."""
        poller = zmq.Poller()
        left_ms = math.ceil((fetch.wake_ns - now_ns) / 1e6)
        for part, piece in wanted.pieces.items():
            if piece.again_ns > now_ns:
                left_ms = min(left_ms, _AGAIN_MS)
            elif (store := fetch.asked(part)) is not None:
                poller.register(self._socket(store), zmq.POLLIN if piece.number else zmq.POLLOUT)
        poller.poll(max(0, min(_LOOK_MS, left_ms)))

    def _send(self, fetch: RowFetch, wanted: WantedRows, part: int) -> None:
        """Ask for the next piece of a part, unless there is no connection yet."""
        store = fetch.asked(part)
        if store is None:
            return
        piece = wanted.pieces[part]
        number = self._numbers + 1
        try:
            self._socket(store).send_multipart(wanted.message(number, part), zmq.NOBLOCK)
        except zmq.Again:
            # One that is being connected to may take as long for it as for an answer.
            if store in self._reached:
                self._failed(fetch, wanted, part, _ENDED, time.monotonic_ns())
            return
        self._reached.add(store)
        self._numbers = piece.number = number

    def _receive(
        self,
        fetch: RowFetch,
        wanted: WantedRows,
        part: int,
        socket: "zmq.Socket[bytes]",
        now_ns: int,
    ) -> None:
        piece = wanted.pieces[part]
        # Others must have their turn, and the time be looked at, whatever a store sends.
        for _ in range(_MOST_WAITING):
            try:
                head, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                given = msgspec.msgpack.decode(head.buffer, type=RowsGiven)
            except UNDECODABLE:
                self._failed(fetch, wanted, part, "sent what is no answer", now_ns)
                return
            if given.number == piece.number:
                break
        else:
            return
        if given.later:
            piece.number, piece.told = 0, given.failure
            piece.again_ns = now_ns + _AGAIN_MS * 1_000_000
            return
        buffers = [frame.buffer for frame in frames]
        taken = 0 if given.failure else wanted.take(part, given.dtype, buffers)
        if not taken:
            told = given.failure or "sent other rows than it was asked for"
            self._failed(fetch, wanted, part, told, now_ns)
            return
        piece.told = ""
        self.received_bytes += sum(buffer.nbytes for buffer in buffers)
        if wanted.go_on(part, taken):
            fetch.progressed(part, now_ns)
            self._send(fetch, wanted, part)
        else:
            with self._lock:
                fetch.answered(part)

    def _failed(
        self, fetch: RowFetch, wanted: WantedRows, part: int, told: str, now_ns: int
    ) -> None:
        """Tell of a store's failure, leave its connection, and ask who is next."""
        store = fetch.asked(part)
        assert store is not None
        self._drop(store)
        piece = wanted.pieces[part]
        piece.number, piece.again_ns, piece.told = 0, 0, ""
        with self._lock:
            other = fetch.failed(part, told, now_ns)
        if other is not None:
            self._send(fetch, wanted, part)

    def _socket(self, store: Store) -> "zmq.Socket[bytes]":
        found = self._sockets.get(store)
        if found is None:
            found = self._sockets[store] = self._context.socket(zmq.DEALER)
            secure(found, self._keys, listens=False)
            found.sndhwm = found.rcvhwm = _MOST_WAITING
            # What cannot be sent now is not kept, so that a lost connection shows.
            found.immediate = True
            found.connect(f"tcp://{store.address}")
        return found

    def _drop(self, store: Store) -> None:
        self._reached.discard(store)
        socket = self._sockets.pop(store, None)
        if socket is not None:
            socket.close(0)
