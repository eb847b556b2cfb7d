"""Inference metrics under the names of NVIDIA Triton, ``nv_inference_…``."""

from collections.abc import Iterator, Sequence
from threading import Lock

from prometheus_client.core import UnknownMetricFamily
from prometheus_client.registry import Collector

#: Triton's word for the reason of a failure; OTHER for reasons not named here.
_REASONS = {
    "too_big": "REJECTED",
    "queue_full": "REJECTED",
    "tenant_limit": "REJECTED",
    "draining": "REJECTED",
    "deadline": "REJECTED",
    "cancelled": "CANCELED",
    "model_error": "BACKEND",
    "out_of_memory": "BACKEND",
    "lane_lost": "BACKEND",
    "rows_lost": "BACKEND",
    "time_limit": "BACKEND",
    "quarantined": "BACKEND",
}

#: Help text by name, in the order of the sums.
_SUMS = {
    "request_success": "Successful requests",
    "count": "Inferences performed",
    "exec_count": "Model executions",
    "request_duration_us": "Cumulative time in the server",
    "queue_duration_us": "Cumulative time queued",
    "compute_input_duration_us": "Cumulative time of preparation that no other work hid",
    "compute_infer_duration_us": "Cumulative time running",
    "compute_output_duration_us": "Cumulative time answering",
}


class TritonMetrics(Collector):
    """Collects cumulative counts and times under Triton's names.

    NOTE: Triton's names lack the suffix `_total` that the client library gives every counter, so
    these metrics are exported untyped. Scraping and `rate()` work all the same.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._sums: dict[tuple[str, str], list[int]] = {}
        self._failures: dict[tuple[str, str, str], int] = {}

    def answered(self, model: str, version: str, count: int, times_ns: Sequence[int]) -> None:
        """Count answered requests. Thread-safe.

        Args:
            model: Name of the model.
            version: Its version.
            count: Number of the requests.
            times_ns: Sums of their latency, and of their times in the queue, in preparation that no
                other work hid, running, and answering.
        """
        with self._lock:
            sums = self._sums.setdefault((model, version), [0] * len(_SUMS))
            for i, value in enumerate((count, count, count, *times_ns)):
                sums[i] += value

    def failed(self, model: str, version: str, reason: str) -> None:
        """Count a request that ended without a result for a reason of the report. Thread-safe."""
        key = model, version, _REASONS.get(reason, "OTHER")
        with self._lock:
            self._failures[key] = self._failures.get(key, 0) + 1

    def collect(self) -> Iterator[UnknownMetricFamily]:
        """Yield all metrics."""
        with self._lock:
            sums = {key: list(values) for key, values in self._sums.items()}
            failures = dict(self._failures)
        for i, (name, help_text) in enumerate(_SUMS.items()):
            family = UnknownMetricFamily(
                f"nv_inference_{name}", help_text, labels=("model", "version")
            )
            scale = 1000 if name.endswith("_us") else 1
            for key, values in sums.items():
                family.add_metric(key, values[i] // scale)
            yield family
        family = UnknownMetricFamily(
            "nv_inference_request_failure",
            "Requests without a result",
            labels=("model", "version", "reason"),
        )
        for labels, count in failures.items():
            family.add_metric(labels, count)
        yield family
