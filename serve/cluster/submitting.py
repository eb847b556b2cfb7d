"""Sends a change of a shared graph to the sequencer, and hears what came of it."""

import threading
import time

import msgspec
import zmq

from serve.cluster.change_wire import MARK, ChangeSubmission, Confirmation, FromSequencer, Refusal
from serve.cluster.row_wire import Keys, secure
from serve.errors import NotReady
from serve.undecodable import UNDECODABLE

#: A connection takes no longer than this, an answer no longer than that; a change is sent again
#: while it has none.
_CONNECT_S, _ANSWER_S, _AGAIN_S = 1.0, 30.0, 1.0
#: A connection that ended is noticed within this time.
_LOOK_S = 0.05


class Submitter:
    """A connection to the sequencer for changes, one at a time."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        sequencer: str,
        keys: Keys | None,
        stopped: threading.Event,
    ) -> None:
        """`stopped` ends what waits for an answer soon."""
        self._context = context
        self._sequencer = sequencer
        #: To whom the connection is.
        self._reached = ""
        self._keys = keys
        self._stopped = stopped
        self._socket: zmq.Socket[bytes] | None = None

    def follow(self, sequencer: str) -> None:
        """Send the next change to that server. For any thread."""
        self._sequencer = sequencer

    def submit(self, server: str, if_version: int | None, record: bytes, key: bytes) -> None:
        """Have the change of `key` made.

        Raises the error for which the sequencer refuses it, and NotReady when it is not heard of.
        """
        message = [MARK, msgspec.msgpack.encode(ChangeSubmission(server, if_version)), record]
        until_s = time.monotonic() + _ANSWER_S
        socket = self._connected()
        sent_s = 0.0
        try:
            while (now_s := time.monotonic()) < until_s:
                if self._stopped.is_set():
                    raise self._lost("did not answer before this server stopped")
                if not socket.poll(0, zmq.POLLOUT):
                    raise self._lost("ended the connection")
                if now_s >= sent_s + _AGAIN_S:
                    socket.send_multipart(message, zmq.NOBLOCK)
                    sent_s = now_s
                if socket.poll(int(_LOOK_S * 1000)) and self._heard(socket, key):
                    return
            raise self._lost(f"did not answer in {_ANSWER_S:g} s")
        except NotReady:
            self.close()
            raise

    def close(self) -> None:
        """End the connection. Idempotent."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def _heard(self, socket: "zmq.Socket[bytes]", key: bytes) -> bool:
        """Return True when the change was made; raises the error for which it was refused."""
        try:
            message: FromSequencer = msgspec.msgpack.decode(
                socket.recv_multipart()[0], type=FromSequencer
            )
        except UNDECODABLE:
            return False
        if isinstance(message, Refusal) and message.key == key:
            raise message.error()
        return isinstance(message, Confirmation) and message.key == key

    def _connected(self) -> "zmq.Socket[bytes]":
        """Return a connection; raises NotReady when there is none."""
        if self._reached != self._sequencer:
            self.close()
        if self._socket is None:
            self._reached = self._sequencer
            self._socket = self._context.socket(zmq.DEALER)
            secure(self._socket, self._keys, listens=False, beats=True)
            # What cannot be sent now is not kept, so that a lost connection shows.
            self._socket.immediate = True
            self._socket.connect(f"tcp://{self._reached}")
        if not self._socket.poll(int(_CONNECT_S * 1000), zmq.POLLOUT):
            self.close()
            raise NotReady(
                f"{self._reached}, the sequencer of changes, cannot be reached: nothing was changed"
            )
        return self._socket

    def _lost(self, what: str) -> NotReady:
        return NotReady(
            f"{self._reached}, the sequencer of changes, {what}: the change may have been made,"
            " see the graph's version"
        )
