"""One order of the changes of graphs that are shared out, for all servers.

The first server of the file of servers is the sequencer: it checks each change, writes it to its
log, and sends it to all others. What is decided is in ``core.cluster.sequencer`` and ``follower``.
"""

import logging
import secrets
import threading
from pathlib import Path

import msgspec
import zmq

from serve.cluster.change_log import ChangeLog, require_short
from serve.cluster.change_wire import ChangeRecord
from serve.cluster.following import FollowerThread
from serve.cluster.made_changes import MadeChanges
from serve.cluster.row_store import RowStore
from serve.cluster.row_wire import Keys
from serve.cluster.sequencing import SequencerThread
from serve.cluster.submitting import Submitter
from serve.core.cluster.follower import Follower
from serve.errors import NotReady, UnknownName
from serve.graphs.change_bytes import encode_change
from serve.graphs.shared_changes import SharedGraphs
from serve.graphs.snapshot import Snapshot
from serve.graphs.updates import Change
from serve.obs.scraped import ChangeCounts
from serve.progress import Progress

_log = logging.getLogger(__name__)

#: A change waits so long for those before it, and so long to be made here once it is in order.
_TURN_S, _MADE_S = 10.0, 10.0
#: A server that starts looks this often whether it has all changes.
_LOOK_S = 0.02


class SharedChanges:
    """Takes part in changes, as the sequencer or as a follower; implements ``ChangeOrder``."""

    def __init__(
        self,
        address: str,
        servers: list[str],
        store: RowStore,
        keys: Keys | None,
        log_file: Path,
        log_bytes: int,
    ) -> None:
        """Open the log where this server, `address`, is the first of `servers`; raises ConfigError.

        `store` brings messages of others. No log is read or made by a server that follows.
        """
        self._address = address
        self._servers = servers
        #: Address of the server that orders changes.
        self.sequencer = servers[0]
        self._store = store
        self._keys = keys
        self._context = zmq.Context()
        self._made = MadeChanges()
        self._turn = threading.Lock()
        #: Guards who the servers are.
        self._roles = threading.Lock()
        self._interrupted = threading.Event()
        self._submitter = Submitter(self._context, self.sequencer, keys, self._interrupted)
        self._log = ChangeLog(log_file, log_bytes) if address == self.sequencer else None
        self._graphs: SharedGraphs | None = None
        self._sequencer: SequencerThread | None = None
        self._follower: FollowerThread | None = None

    def know(self, servers: list[str]) -> None:
        """Know these servers from now on, of which the first may be another sequencer.

        A server becomes or ends to be the sequencer by a start alone.
        """
        first = servers[0]
        if first != self.sequencer and (first == self._address or self._log is not None):
            _log.error(
                "%s is the first of the servers and %s orders changes until it starts anew",
                first, self.sequencer,
            )  # fmt: skip
            first = self.sequencer
        with self._roles:
            self._servers, self.sequencer = servers, first
            self._submitter.follow(first)
            if self._sequencer is not None:
                self._sequencer.know(servers)
            if self._follower is not None:
                self._follower.follow(first)

    def told(self) -> ChangeCounts:
        """Return how this server stands, for metrics."""
        if self._sequencer is not None and self._log is not None:
            made, behind, heard = self._sequencer.number, 0, True
        elif self._follower is not None:
            follower = self._follower.follower
            made, behind, heard = follower.number, follower.behind, self._follower.hears()
        else:
            made, behind, heard = 0, 0, False
        return ChangeCounts(
            made=made,
            behind=behind,
            in_step=heard and not self.trouble,
            log_bytes=0 if self._log is None else self._log.nbytes,
        )

    @property
    def trouble(self) -> str:
        """See ``ChangeOrder``."""
        if self._sequencer is not None:
            return self._sequencer.stuck
        return "" if self._follower is None else self._follower.follower.stuck

    def follow(self, graphs: SharedGraphs, progress: Progress, patience_s: float) -> None:
        """See ``ChangeOrder``."""
        self._graphs = graphs
        if self._log is not None:
            messages = self._store.changes()
            with self._roles:
                self._sequencer = SequencerThread(
                    self._context, messages, self._servers, self._log, graphs, self._made
                )
            self._sequencer.replay(progress)
            self._sequencer.start()
            return
        with self._roles:
            self._follower = FollowerThread(
                self._context, self._address, self.sequencer, self._keys, graphs, self._made
            )
        self._follower.start()
        self._catch_up(self._follower, progress, patience_s)

    def change(self, graph: str, change: Change, if_version: int | None) -> Snapshot:
        """See ``ChangeOrder``."""
        if self._graphs is None or self._interrupted.is_set():
            raise NotReady("the server is starting or has stopped")
        files = self._graphs.files_of(graph)
        if files is None:
            raise UnknownName(f"no graph '{graph}' is shared out here")
        if trouble := self.trouble:
            raise NotReady(f"this server makes no changes of other servers: it {trouble}")
        key = secrets.token_bytes(16)
        record = msgspec.msgpack.encode(ChangeRecord(key, graph, files, encode_change(change)))
        # The sequencer ends the connection of who sends it more than a message holds.
        require_short(record)
        with self._made.expected(key):
            if not self._turn.acquire(timeout=_TURN_S):
                raise NotReady(f"changes before this one have not ended in {_TURN_S:g} s")
            try:
                if self._context.closed:
                    raise NotReady("the server has stopped")
                self._submitter.submit(self._address, if_version, record, key)
            finally:
                self._turn.release()
            found = self._made.wait(key, _MADE_S)
        if found is None:
            raise NotReady(
                f"the change is in order, and this server did not make it in {_MADE_S:g} s"
            )
        return found

    def interrupt(self) -> None:
        """See ``ChangeOrder``."""
        self._interrupted.set()

    def close(self) -> None:
        """Take part no more. Idempotent; before the store is stopped."""
        if self._context.closed:
            return
        self.interrupt()
        for thread in (self._sequencer, self._follower):
            if thread is not None:
                thread.stop()
        if self._log is not None:
            self._log.close()
        # Who submits a change looks at `_interrupted` all the time.
        with self._turn:
            self._submitter.close()
            self._context.destroy(linger=0)

    def _catch_up(self, thread: FollowerThread, progress: Progress, patience_s: float) -> None:
        follower, waited_s, before = thread.follower, 0.0, -1
        while not follower.caught_up:
            if follower.stuck:
                raise NotReady(f"this server {follower.stuck}")
            if self._interrupted.wait(_LOOK_S):
                raise NotReady("the start was interrupted")
            if (number := follower.number) == before:
                waited_s += _LOOK_S
            else:
                self._tell(follower, progress)
                waited_s, before = 0.0, number
            if waited_s > patience_s:
                raise NotReady(
                    f"{self.sequencer}, the sequencer of changes, sent none in {patience_s:g} s"
                )

    def _tell(self, follower: Follower, progress: Progress) -> None:
        if follower.latest is None:
            progress(f"waiting for {self.sequencer}, which orders changes", 0.0)
            return
        share = follower.number / max(1, follower.latest)
        progress(f"making changes, {follower.number:,} of {follower.latest:,}", share)
