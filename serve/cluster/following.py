"""Carries out what a follower of the sequencer decides: asks for changes, and makes them."""

import logging
import time
from collections import deque
from contextlib import suppress

import msgspec
import zmq

from serve.cluster.change_wire import MARK, Ask, ChangeRecord, Changes, FromSequencer, OtherHistory
from serve.cluster.made_changes import MadeChanges
from serve.cluster.row_wire import Keys, secure
from serve.cluster.socket_thread import SocketThread
from serve.core.cluster.follower import (
    AskChanges,
    ChangeFailed,
    ChangeMade,
    ChangesCame,
    Follower,
    FollowerCommand,
    FollowerEvent,
    HistoryRefused,
    MakeChange,
)
from serve.core.cluster.sequencer import TimeToLook
from serve.errors import ServeError
from serve.graphs.change_bytes import decode_change
from serve.graphs.shared_changes import SharedGraphs
from serve.undecodable import UNDECODABLE

_log = logging.getLogger(__name__)


class FollowerThread(SocketThread):
    """Makes the changes of the sequencer here."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        sequencer: str,
        keys: Keys | None,
        graphs: SharedGraphs,
        made: MadeChanges,
    ) -> None:
        """`address` is the name of this server among those of `sequencer`; `made` hears of all."""
        socket = context.socket(zmq.DEALER)
        secure(socket, keys, listens=False, beats=True)
        # An ask waits for a connection: it is what a server that comes back hears first.
        socket.sndhwm = 1
        socket.connect(f"tcp://{sequencer}")
        super().__init__("follower", context, socket)
        self._address = address
        #: Whom it is to follow, and whom it does.
        self._wanted = self._followed = sequencer
        self._graphs = graphs
        self._made = made
        self.follower = Follower()
        self._told = False

    def follow(self, sequencer: str) -> None:
        """Follow that server instead, soon."""
        self._wanted = sequencer

    def hears(self) -> bool:
        """Return True when the sequencer was heard of lately."""
        return self.follower.hears(time.monotonic_ns())

    def wake_ns(self) -> int | None:
        """See ``SocketThread``."""
        return self.follower.wake_ns

    def waited(self, now_ns: int) -> None:
        """See ``SocketThread``."""
        if (wanted := self._wanted) != self._followed:
            self._socket.disconnect(f"tcp://{self._followed}")
            self._socket.connect(f"tcp://{wanted}")
            self._followed = wanted
        self._handle(TimeToLook(), now_ns)

    def received(self, frames: list[bytes], now_ns: int) -> None:
        """Take a message of the sequencer; what is none is left out."""
        try:
            message: FromSequencer = msgspec.msgpack.decode(frames[0], type=FromSequencer)
        except UNDECODABLE:
            return
        if isinstance(message, Changes):
            event = ChangesCame(message.after, message.latest, tuple(frames[1:]))
            self._handle(event, now_ns)
        elif isinstance(message, OtherHistory):
            self._handle(HistoryRefused(message.number), now_ns)

    def _handle(self, event: FollowerEvent, now_ns: int) -> None:
        commands: deque[FollowerCommand] = deque(self.follower.handle(event, now_ns))
        while commands:
            match commands.popleft():
                case AskChanges(number, digest, waits):
                    ask = msgspec.msgpack.encode(Ask(self._address, number, digest, waits))
                    with suppress(zmq.Again):
                        self._socket.send_multipart([MARK, ask, b""], zmq.NOBLOCK)
                case MakeChange(record):
                    result = self._make(record)
                    commands += self.follower.handle(result, time.monotonic_ns())
        if self.follower.stuck and not self._told:
            self._told = True
            _log.error("changes of shared graphs end here: this server %s", self.follower.stuck)

    def _make(self, data: bytes) -> ChangeMade | ChangeFailed:
        try:
            record = msgspec.msgpack.decode(data, type=ChangeRecord)
            files = self._graphs.files_of(record.graph)
            if files is None:
                return ChangeMade()
            if files != record.files:
                return ChangeFailed(f"graph '{record.graph}': other files are read here")
            snapshot = self._graphs.make(record.graph, decode_change(record.change))
        except (ServeError, msgspec.MsgspecError) as error:
            return ChangeFailed(str(error))
        except Exception as error:
            return ChangeFailed(repr(error))
        self._made.tell(record.key, snapshot)
        return ChangeMade()
