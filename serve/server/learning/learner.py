"""Learning from ended runs: corrections of the estimates, in batches, off the path of an answer."""

import logging
import threading

from serve.core.events import SlowdownChanged
from serve.core.jobs.events import JobSlowdownChanged
from serve.core.slowdown import NO_SLOWDOWN
from serve.errors import ServeError
from serve.obs.record import RequestRecord
from serve.server.catalogue import ModelCatalogue
from serve.server.lane_run import Lesson
from serve.server.learning.alone import counts_of, shows_solo_time
from serve.server.learning.beside import is_news

_log = logging.getLogger(__name__)


class Learner:
    """Lessons of runs that ended, until they are learned. Under the lock unless said otherwise."""

    def __init__(
        self, catalogue: ModelCatalogue, lock: threading.Lock, slowdown: tuple[float, ...]
    ) -> None:
        """`slowdown` by number of co-runners is what the scheduler begins with."""
        self._catalogue = catalogue
        self._lock = lock
        self._slowdown = slowdown
        self._job_slowdown: tuple[float, ...] = NO_SLOWDOWN
        self._lessons: list[Lesson] = []

    @property
    def backlog(self) -> int:
        """Number of lessons not yet learned. Any thread."""
        return len(self._lessons)

    def add(self, lesson: Lesson) -> None:
        """Keep a lesson for the next batch."""
        self._lessons.append(lesson)

    def learn(self) -> list[SlowdownChanged | JobSlowdownChanged]:
        """Learn all lessons; return what is news of the slowdown by runs and by training jobs."""
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            try:
                lesson()
            except Exception:
                # A bug, which no thread that serves must end for.
                _log.exception("a run that ended cannot be learned from")
        news: list[SlowdownChanged | JobSlowdownChanged] = []
        if is_news(learned := self._catalogue.slowdown.by_runs.table, self._slowdown):
            self._slowdown = learned
            news.append(SlowdownChanged(learned))
        if is_news(learned := self._catalogue.slowdown.by_jobs.table, self._job_slowdown):
            self._job_slowdown = learned
            news.append(JobSlowdownChanged(learned))
        return news

    def observe_solo(self, record: RequestRecord) -> None:
        """Correct the solo times of the model by a request that was alone. Without the lock."""
        if not shows_solo_time(record):
            return
        try:
            entry = self._catalogue.get(record.model, record.version)
        except ServeError:
            return  # unloaded meanwhile
        counts = counts_of(entry, record.num_nodes, record.num_edges)
        if counts is None:
            return
        with self._lock:
            entry.estimator.observe_solo(counts, record.latency_ns)
