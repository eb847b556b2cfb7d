"""Carries out what the sequencer of changes decides: a log, the graphs here, messages to others."""

import time
from collections import Counter
from collections.abc import Callable, Collection

import msgspec
import zmq

from serve.cluster.change_log import ChangeLog
from serve.cluster.change_wire import (
    BATCH_BYTES,
    ChangeRecord,
    Changes,
    ChangeSubmission,
    Confirmation,
    FromSequencer,
    OtherHistory,
    Refusal,
    ToSequencer,
)
from serve.cluster.made_changes import MadeChanges
from serve.cluster.socket_thread import SocketThread
from serve.core.cluster.sequencer import (
    ChangeLogged,
    ChangeRefused,
    ChangesAsked,
    ChangeSubmitted,
    ConfirmChange,
    LogChange,
    RefuseHistory,
    RepeatRefusal,
    SendChanges,
    Sequencer,
    SequencerEvent,
    TimeToLook,
)
from serve.errors import ConfigError, Mismatch, NotReady, ServeError, UnknownName
from serve.graphs.change_bytes import decode_change
from serve.graphs.shared_changes import SharedGraphs
from serve.progress import Progress
from serve.undecodable import UNDECODABLE


class SequencerThread(SocketThread):
    """Puts changes in their order."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        messages: "zmq.Socket[bytes]",
        servers: Collection[str],
        log: ChangeLog,
        graphs: SharedGraphs,
        made: MadeChanges,
    ) -> None:
        """`messages` brings those of the `servers` and takes the answers; `made` hears of all."""
        super().__init__("sequencer", context, messages)
        self._servers = frozenset(servers)
        self._log = log
        self._graphs = graphs
        self._made = made
        self._sequencer = Sequencer()
        #: By server, the connections of its last ask, and of its last submission.
        self._asked: dict[str, bytes] = {}
        self._submitted: dict[str, bytes] = {}
        self._refusals: dict[str, Refusal] = {}
        #: Submissions by what came of them.
        self.counts: Counter[str] = Counter(dict.fromkeys(("made", "refused"), 0))
        #: Why it takes no more changes; empty while it does.
        self.stuck = ""

    @property
    def number(self) -> int:
        """Number of changes in the log."""
        return self._sequencer.number

    def know(self, servers: Collection[str]) -> None:
        """Hear these servers from now on."""
        self._servers = frozenset(servers)

    def replay(self, progress: Progress) -> None:
        """Make all changes of the log, before anything else; raises ConfigError."""
        total = self._log.count
        while (number := self._sequencer.number) < total:
            progress(f"making changes of the log, {number:,} of {total:,}", number / total)
            for data in self._log.records(number, BATCH_BYTES):
                try:
                    record = msgspec.msgpack.decode(data, type=ChangeRecord)
                    self._check(record)
                    self._graphs.make(record.graph, decode_change(record.change))
                except (ServeError, *UNDECODABLE) as error:
                    raise ConfigError(
                        f"cluster.rows.log: change {self._sequencer.number + 1} cannot be made:"
                        f" {error}; a log is of the graphs that it began with"
                    ) from error
                self._sequencer.handle(ChangeLogged(record.key, data), time.monotonic_ns())

    def wake_ns(self) -> int | None:
        """See ``SocketThread``."""
        return self._sequencer.wake_ns

    def waited(self, now_ns: int) -> None:
        """See ``SocketThread``."""
        self._handle(TimeToLook(), now_ns)

    def received(self, frames: list[bytes], now_ns: int) -> None:
        """Take a message of another server; one that is none is left out."""
        try:
            identity, head, data = frames
            message: ToSequencer = msgspec.msgpack.decode(head, type=ToSequencer)
            if message.server not in self._servers:
                return
            if isinstance(message, ChangeSubmission):
                key = msgspec.msgpack.decode(data, type=ChangeRecord).key
        except (ValueError, *UNDECODABLE):
            return
        if isinstance(message, ChangeSubmission):
            self._submitted[message.server] = identity
            event = ChangeSubmitted(message.server, key)
            self._handle(event, now_ns, lambda: self._log_change(key, message, data, now_ns))
        else:
            self._asked[message.server] = identity
            self._handle(ChangesAsked(*msgspec.structs.astuple(message)), now_ns)

    def _handle(
        self, event: SequencerEvent, now_ns: int, log: Callable[[], None] = lambda: None
    ) -> None:
        """Do what comes of an event; `log` logs and makes the change that it submits."""
        for command in self._sequencer.handle(event, now_ns):
            match command:
                case LogChange():
                    log()
                case RepeatRefusal(server):
                    self._send(self._submitted[server], self._refusals[server])
                case SendChanges(server, after):
                    head = Changes(after, self._sequencer.number)
                    records = self._log.records(after, BATCH_BYTES)
                    self._send(self._asked[server], head, *records)
                case RefuseHistory(server, number):
                    self._send(self._asked[server], OtherHistory(number))
                case ConfirmChange(server, key, number):
                    self._send(self._submitted[server], Confirmation(key, number))

    def _log_change(self, key: bytes, message: ChangeSubmission, data: bytes, now_ns: int) -> None:
        server = message.server
        try:
            if self.stuck:
                raise NotReady(self.stuck)
            record = msgspec.msgpack.decode(data, type=ChangeRecord)
            self._check(record)
            change = decode_change(record.change)
            snapshot = self._graphs.make(
                record.graph, change, message.if_version, lambda: self._log.append(data)
            )
        except ServeError as error:
            self.counts["refused"] += 1
            self._refusals[server] = refusal = Refusal.of(key, error)
            self._send(self._submitted[server], refusal)
            self._handle(ChangeRefused(server, key), now_ns)
            return
        except Exception as error:
            # The change may be in the log and not in the graph.
            self.stuck = f"the sequencer failed at a change, and has to start anew: {error}"
            raise
        self.counts["made"] += 1
        self._made.tell(key, snapshot)
        self._handle(ChangeLogged(key, data, server), now_ns)

    def _check(self, record: ChangeRecord) -> None:
        """Raise UnknownName or Mismatch unless the change is for a graph of here."""
        files = self._graphs.files_of(record.graph)
        if files is None:
            raise UnknownName(f"no graph '{record.graph}' is shared out here")
        if files != record.files:
            raise Mismatch(f"graph '{record.graph}': other files or parts of it are read here")

    def _send(self, identity: bytes, head: FromSequencer, *records: bytes) -> None:
        """Send an answer, unless too many wait already: who lost one asks again."""
        try:
            self._socket.send_multipart(
                [identity, msgspec.msgpack.encode(head), *records], zmq.NOBLOCK
            )
        except zmq.Again:
            return
