"""The features that servers share out: given to others, and got from them for a request.

Who is asked and for how long is decided by ``core.cluster.rows``.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from serve.access.front_stamps import read_key
from serve.cluster.row_link import Link
from serve.cluster.row_store import RowStore
from serve.cluster.row_wire import Keys
from serve.cluster.shared_changes import SharedChanges
from serve.cluster.stores_file import read_stores
from serve.cluster.wanted_rows import WantedDraws, WantedFeatures, WantedRows
from serve.core.cluster.rows import RowFetch, Stores, expected_ns
from serve.errors import ConfigError, NotReady
from serve.graphs.csr import Ids, Rows
from serve.graphs.edges import Edges
from serve.graphs.partition import Parts
from serve.graphs.shared_column import RowsOf, SharedColumn
from serve.obs.scraped import RowCounts

_log = logging.getLogger(__name__)

#: Requests that get rows at once, each over connections of its own; and how long others wait.
MOST_FETCHES, _TURN_S = 32, 1.0
#: Bytes of a value as it is stored at most.
_VALUE_BYTES = 4


class SharedRows:
    """Implements ``graphs.shared_column.RowSource``. Any thread may call any method."""

    def __init__(
        self, part: int, listen: str, stores_file: Path, key_file: Path | None, patience_ms: int
    ) -> None:
        """Listen, and know the servers of `stores_file`; raises ConfigError.

        Args:
            part: Part of the nodes whose features are here.
            listen: `host:port`, where others ask for rows of it.
            stores_file: Names all servers, this one too, see ``stores_file`` and ``reload``.
            key_file: Has what servers share; None: whoever reaches the port is given rows.
            patience_ms: Time after which a server that sends nothing has none to give.
        """
        self._part = part
        self._patience_ns = patience_ms * 1_000_000
        keys = None if key_file is None else Keys.of(read_key(key_file))
        self.file = stores_file
        known = read_stores(stores_file)
        self._servers = list(known)
        self._stores = Stores({address: of for address, of in known.items() if of != part})
        self._store = RowStore(listen, keys)
        self._keys = keys
        self._changes: SharedChanges | None = None
        self.port = self._store.port
        self._store.start()
        #: Guards what is known of the stores.
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._links: LifoQueue[Link] = LifoQueue()
        for _ in range(MOST_FETCHES):
            self._links.put(Link(self._context, keys, self._lock))
        #: Requests by how they got rows of others, and the bytes of these.
        self.counts: Counter[str] = Counter(dict.fromkeys(("got", "lost", "bytes", "waited_ns"), 0))

    @property
    def part(self) -> int:
        """See ``RowSource``."""
        return self._part

    @property
    def changes(self) -> SharedChanges | None:
        """See ``RowSource``."""
        return self._changes

    def reload(self) -> None:
        """Read the file of servers again; keeps what it said when it cannot be, and logs it."""
        try:
            known = read_stores(self.file)
        except ConfigError as error:
            _log.error("the servers that hold features stay as they were: %s", error)
            return
        self._servers = list(known)
        with self._lock:
            self._stores.change({a: part for a, part in known.items() if part != self._part})
        if self._changes is not None:
            self._changes.know(self._servers)
        idle: list[Link] = []
        with suppress(Empty):
            while True:
                idle.append(self._links.get_nowait())
        for link in reversed(idle):
            link.leave_gone()
            self._links.put(link)

    def order_changes(self, address: str, log_file: Path, log_bytes: int) -> None:
        """Take part in changes as the server of that address; raises ConfigError.

        The first server of the file orders them and keeps them in `log_file`, up to `log_bytes`.
        """
        if address not in self._servers:
            raise ConfigError(
                f"cluster.rows.servers_file does not name this server, {address}; see"
                " cluster.rows.address"
            )
        self._changes = SharedChanges(
            address, self._servers, self._store, self._keys, log_file, log_bytes
        )

    def told(self) -> RowCounts:
        """Return what was exchanged until now, for metrics."""
        given = self._store.counts
        with self._lock:
            mine = dict(self.counts)
        return RowCounts(
            got=mine["got"],
            lost=mine["lost"],
            got_bytes=mine["bytes"],
            waited_ns=mine["waited_ns"],
            given_bytes=given["bytes"],
            refused=given["refused"],
            changes=None if self._changes is None else self._changes.told(),
        )

    @property
    def given(self) -> Counter[str]:
        """What others asked for, see ``RowStore.counts``."""
        return self._store.counts

    def hold(self, column: SharedColumn, edges: Edges | None = None) -> None:
        """See ``RowSource``."""
        self._store.hold(column, edges)

    def expected_ns(self, parts: Parts, num_features: int) -> int:
        """See ``RowSource``."""
        return expected_ns(parts.size * num_features * _VALUE_BYTES, np.unique(parts).size)

    @contextmanager
    def asked(
        self, of: RowsOf, nodes: Ids, parts: Parts, num_features: int
    ) -> Iterator[Callable[[NDArray[Any], Ids], int]]:
        """See ``RowSource``."""
        wanted = WantedFeatures(of, nodes, parts, num_features)
        with self._asked(wanted) as arrive:

            def write(target: NDArray[Any], at: Ids) -> int:
                wanted.write_to(target, at)
                return arrive("gave features")

            yield write

    def drawn(
        self, of: RowsOf, nodes: Ids, parts: Parts, num_nodes: int, fanout: int, hop_seed: int
    ) -> tuple[Rows, int]:
        """See ``RowSource``."""
        wanted = WantedDraws(of, nodes, parts, num_nodes, fanout, hop_seed)
        with self._asked(wanted) as arrive:
            waited_ns = arrive("drew neighbours for nodes")
        return wanted.rows(), waited_ns

    @contextmanager
    def _asked(self, wanted: WantedRows) -> Iterator[Callable[[str], int]]:
        """Ask for what is wanted; yield what waits for it, which is told what servers are to do."""
        link = self._link()
        try:
            with self._lock:
                fetch = RowFetch(
                    self._stores, list(wanted.pieces), time.monotonic_ns(), self._patience_ns
                )
            try:
                link.ask(fetch, wanted)
                yield partial(self._arrive, link, fetch, wanted)
            finally:
                with self._lock:
                    fetch.end()
        finally:
            link.leave_gone()
            self._links.put(link)

    def _arrive(self, link: Link, fetch: RowFetch, wanted: WantedRows, meant: str) -> int:
        """Wait for all that is wanted; return for how long, in ns, or raise NotReady."""
        began_ns = time.monotonic_ns()
        link.collect(fetch, wanted)
        waited_ns = time.monotonic_ns() - began_ns
        received_bytes, link.received_bytes = link.received_bytes, 0
        with self._lock:
            self.counts["got" if fetch.lost is None else "lost"] += 1
            self.counts["bytes"] += received_bytes
            self.counts["waited_ns"] += waited_ns
        if fetch.lost is not None:
            raise NotReady(
                f"graph '{wanted.of_rows.graph}': no server {meant} of part"
                f" {fetch.lost.part}: {fetch.lost.told}"
            )
        return waited_ns

    def _link(self) -> Link:
        try:
            return self._links.get(timeout=_TURN_S)
        except Empty:
            raise NotReady(
                f"{MOST_FETCHES} requests get features from other servers, and none ended in"
                f" {_TURN_S:g} s"
            ) from None

    def close(self) -> None:
        """Give and get nothing any more. Idempotent."""
        if self._changes is not None:
            self._changes.close()
        self._store.stop()
        self._context.destroy(linger=0)
