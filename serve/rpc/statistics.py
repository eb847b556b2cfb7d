"""Counts and durations by model, as ModelStatistics reports them."""

import threading
from collections import deque
from dataclasses import dataclass, field

from serve.obs.record import RequestRecord
from serve.pb import grpc_service_pb2 as pb

#: Most records held before they are counted.
_MOST_UNCOUNTED = 1024


@dataclass(slots=True)
class _Duration:
    """Number and total length of some intervals."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += max(0, ns)

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


@dataclass(slots=True)
class _ModelTotals:
    """Totals of one model version.

    The four stages always have equal counts, which load generators require.
    """

    last_unix_ms: int = 0
    success: _Duration = field(default_factory=_Duration)
    fail: _Duration = field(default_factory=_Duration)
    queue: _Duration = field(default_factory=_Duration)
    prepare: _Duration = field(default_factory=_Duration)
    run: _Duration = field(default_factory=_Duration)
    answer: _Duration = field(default_factory=_Duration)


class Statistics:
    """Totals since the start, for every model that had a request. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[tuple[str, str], _ModelTotals] = {}
        #: Records not counted yet; they are when somebody asks, so that no answer waits for it.
        self._uncounted: deque[RequestRecord] = deque()

    def succeeded(self, record: RequestRecord) -> None:
        """Add a request that was answered with a result."""
        self._uncounted.append(record)
        if len(self._uncounted) >= _MOST_UNCOUNTED:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Count the records held; the caller holds the lock."""
        while self._uncounted:
            record = self._uncounted.popleft()
            model = self._models.setdefault((record.model, record.version), _ModelTotals())
            done_ms = (record.arrived_unix_ns + record.latency_ns) // 1_000_000
            model.last_unix_ms = max(model.last_unix_ms, done_ms)
            model.success.add(record.latency_ns)
            model.queue.add(record.queue_ns)
            model.prepare.add(record.prepare_ns)
            model.run.add(record.run_ns)
            model.answer.add(record.answer_ns)

    def failed(self, name: str, version: str, latency_ns: int) -> None:
        """Add a request for an existing model that ended in an error."""
        with self._lock:
            self._models.setdefault((name, version), _ModelTotals()).fail.add(latency_ns)

    def message(self, name: str, version: str) -> pb.ModelStatistics:
        """Return the totals of one version; all are zero when it had no request."""
        with self._lock:
            self._count()
            model = self._models.get((name, version)) or _ModelTotals()
            return pb.ModelStatistics(
                name=name,
                version=version,
                last_inference=model.last_unix_ms,
                inference_count=model.success.count,
                execution_count=model.success.count,
                inference_stats=pb.InferStatistics(
                    success=model.success.message(),
                    fail=model.fail.message(),
                    queue=model.queue.message(),
                    compute_input=model.prepare.message(),
                    compute_infer=model.run.message(),
                    compute_output=model.answer.message(),
                ),
            )
