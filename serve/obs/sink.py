"""Hand-over of request records from the hot path to the database and to observers, by a thread."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from queue import Empty, SimpleQueue

from serve.obs.live.tally import ServerState
from serve.obs.live.training import ShownJob
from serve.obs.record import RequestRecord
from serve.obs.row_sampling import RowSampler
from serve.obs.store import RecordStore
from serve.obs.wall_clock import WallClock
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Longest time from putting a record to committing its row.
COMMIT_INTERVAL_S = 0.4
#: Time after which lost calls and the state are stored on a server without requests.
_IDLE_INTERVAL_S = 1.0
#: Most rows per batch for requests that never reached a lane: about 100 a second.
_MOST_UNLAUNCHED = 40
#: Time for which a clock that is set ahead must stay so before rows are deleted by it.
DOUBTS_NS = 3_600_000_000_000
#: Most records that wait for the database; more are dropped and counted.
MAX_WAITING = 100_000

Observer = Callable[[RequestRecord], None]


class RecordSink:
    """Accepts records in about 0.1 µs; stores them and calls observers a little later."""

    def __init__(
        self,
        store: RecordStore,
        observers: Sequence[Observer] = (),
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        *,
        flushes: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Start the thread, which calls each observer once per record, in order.

        Args:
            store: Takes the rows.
            observers: Get every record.
            wall_ns: Returns nanoseconds since the epoch.
            monotonic_ns: Returns the nanoseconds of a clock that nobody sets.
            flushes: Called when the observers have had a batch of records.
        """
        self._store = store
        self._clock = WallClock(wall_ns, monotonic_ns)
        #: Tells how old rows are. What a wrong clock would delete does not come back.
        self._age_clock = WallClock(wall_ns, monotonic_ns, doubts_ns=DOUBTS_NS)
        self._observers = tuple(observers)
        self._flushes = tuple(flushes)
        self._queue: SimpleQueue[RequestRecord | None] = SimpleQueue()
        self._closing = threading.Event()
        self._lost: Callable[[], Iterable[RequestRecord]] = tuple
        self._state: Callable[[], ServerState | None] = lambda: None
        self._jobs: Callable[[], tuple[ShownJob, ...]] = tuple
        #: For the thread to do to the store.
        self._changes: SimpleQueue[Callable[[RecordStore], None]] = SimpleQueue()
        self._overflowed = 0
        self._observer_failed = False
        self._thread = Thread(target=self._run, name="record-sink")
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of records lost for want of a database that takes them."""
        return self._store.dropped + self._overflowed

    def count_lost(self, records: Callable[[], Iterable[RequestRecord]]) -> None:
        """Store what `records` returns as well, from time to time and at the end.

        Observers do not see it.
        """
        self._lost = records

    def watch_state(self, state: Callable[[], ServerState | None]) -> None:
        """Ask `state` with each commit, on the thread, for what the live page shows of the server.

        It should cost little: commits come every `COMMIT_INTERVAL_S` while there are requests.
        """
        self._state = state

    def watch_jobs(self, jobs: Callable[[], tuple[ShownJob, ...]]) -> None:
        """Ask `jobs` with each commit, on the thread, for the training jobs of the live page."""
        self._jobs = jobs

    def change(self, how: Callable[[RecordStore], None]) -> None:
        """Call `how` on the thread within a few seconds; it may not raise."""
        self._changes.put(how)

    def put(self, record: RequestRecord) -> None:
        """Accept a record; never blocks and never raises. Thread-safe."""
        if self._queue.qsize() >= MAX_WAITING:
            self._overflowed += 1
            return
        self._queue.put(record)

    def close(self) -> None:
        """Store every record put before this call, then close the database. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        closed = False
        while not closed:
            try:
                first = self._queue.get(timeout=_IDLE_INTERVAL_S)
            except Empty:
                self._store_lost()
                continue
            # Collect before writing, for two wake-ups per interval instead of one per request.
            self._closing.wait(COMMIT_INTERVAL_S)
            waiting = self._queue.qsize()
            closed = self._store_batch(chain((first,), (self._queue.get() for _ in range(waiting))))
        self._store.close()

    def _store_batch(self, batch: Iterable[RequestRecord | None]) -> bool:
        """Store, commit and observe a batch; returns True when it held the end mark."""
        closed = False
        sampler = RowSampler(_MOST_UNLAUNCHED)
        now_s = self._now_s()
        for record in batch:
            if record is None:
                closed = True
                break
            self._observe(record)
            self._store.count(record, now_s)
            # NOTE: rows are inserted one by one on purpose. SQLite releases the interpreter lock in
            # every insert, so a thread that answers requests waits for one row, not for the batch.
            if sampler.has_row(record):
                self._store.insert(record)
        for record in sampler.rest():
            self._store.insert(record)
        for flush in self._flushes:
            try:
                flush()
            except Exception:
                self._tell_failed()
        self._store_lost()
        return closed

    def _store_lost(self) -> None:
        """Store and commit what is left, and the state; change the store where it was asked."""
        for _ in range(self._changes.qsize()):
            self._changes.get()(self._store)
        now_s = self._now_s()
        self._ask_lost(now_s)
        self._ask_state(now_s)
        self._store.overflowed = self._overflowed
        self._store.commit(now_s)
        self._store.trim(self._age_clock.now_ns())

    def _now_s(self) -> int:
        """Return the seconds since the epoch; log when the clock was set."""
        if step_ns := self._clock.follow():
            way = "ahead" if step_ns > 0 else "back"
            _log.warning("the system's clock was set %s by %.1f s", way, abs(step_ns) / 1e9)
        return self._clock.now_ns() // 1_000_000_000

    def _observe(self, record: RequestRecord) -> None:
        for observer in self._observers:
            try:
                observer(record)
            except Exception:
                self._tell_failed()

    def _ask_lost(self, now_s: int) -> None:
        """Store what was lost before it became a record."""
        try:
            lost = tuple(self._lost())
        except Exception:
            self._tell_failed()
            return
        for record in lost:
            self._store.count(record, now_s)
            self._store.insert(record)

    def _ask_state(self, now_s: int) -> None:
        """Have the store take what the live page shows of the server."""
        try:
            if (state := self._state()) is not None:
                self._store.tell(state, now_s)
            self._store.tell_jobs(self._jobs())
        except Exception:
            self._tell_failed()

    def _tell_failed(self) -> None:
        if not self._observer_failed:
            self._observer_failed = True
            _log.exception("an observer of records failed; the rows are still stored")
