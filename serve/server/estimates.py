"""Estimates of requests that are not sent: memory, time and how many fit at once."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from serve.core.types import TaskEstimate
from serve.errors import InvalidInput
from serve.estimate.estimator import Breakdown
from serve.server.api import Fanouts, ModelEstimate, SampleEstimate
from serve.server.catalogue import ModelCatalogue, ModelEntry
from serve.server.node_requests import NodeRequests


class Estimates:
    """Answers what a request would need. Any thread may call any method but `union`."""

    def __init__(
        self,
        catalogue: ModelCatalogue,
        node_requests: NodeRequests,
        lock: threading.Lock,
        budgets_bytes: Callable[[], Sequence[int]],
    ) -> None:
        """`lock` guards the estimators; `budgets_bytes` returns each device's memory for tasks."""
        self._catalogue = catalogue
        self._node_requests = node_requests
        self._lock = lock
        self._budgets_bytes = budgets_bytes

    def of_graph(self, name: str, version: str, num_nodes: int, num_edges: int) -> ModelEstimate:
        """Estimate a request that brings a graph of that size; raises a ServeError."""
        if num_nodes < 0 or num_edges < 0:
            raise InvalidInput(f"nodes {num_nodes} and edges {num_edges} must be at least 0")
        entry = self._catalogue.get(name, version)
        with self._lock:
            found = entry.estimator.describe(*_counts(entry, num_nodes, num_edges))
        return self._model_estimate(entry, found, num_nodes, num_edges)

    def of_sample(
        self,
        name: str,
        version: str,
        graph: str,
        num_ids: int,
        fanouts: Fanouts | None,
        node_type: str | None = None,
    ) -> ModelEstimate:
        """Estimate a request by node id: time for a usual sample, memory for a large one.

        Raises a ServeError.
        """
        entry = self._catalogue.get(name, version)
        request = self._node_requests.make(graph, num_ids, fanouts, entry, node_type)
        with self._lock:
            size = request.sizes.expected(num_ids)
            usual = entry.estimator.describe(*size.counts)
            large = entry.estimator.describe(*size.counts_high)
        found = replace(
            large,
            run_ns=usual.run_ns,
            run_high_ns=usual.run_high_ns,
            solo_ns=usual.solo_ns + size.prepare_ns,
            solo_high_ns=usual.solo_high_ns + size.prepare_ns,
        )
        sample = SampleEstimate(graph, num_ids, request.fanouts, size)
        return replace(
            self._model_estimate(entry, found, size.num_nodes, size.num_edges), sample=sample
        )

    def union(self, key: str, sizes: Sequence[tuple[int, ...]]) -> TaskEstimate | None:
        """Return the estimate of one run of several requests; None where they cannot be merged.

        The scheduler's ``UnionEstimate``; under the lock.
        """
        entry = self._catalogue.by_key(key)
        if entry is None or not entry.signature.mergeable:
            return None
        return entry.estimator.union(sizes)

    def _model_estimate(
        self, entry: ModelEntry, found: Breakdown, num_nodes: int, num_edges: int
    ) -> ModelEstimate:
        budgets_bytes = self._budgets_bytes()
        return ModelEstimate(
            model=entry.spec.name,
            version=str(entry.spec.version),
            executor=entry.executor,
            num_nodes=num_nodes,
            num_edges=num_edges,
            weights_bytes=entry.spec.weights_bytes,
            input_bytes=found.input_bytes,
            peak_bytes=found.peak_bytes,
            reserve_bytes=found.reserve_bytes,
            run_ns=found.run_ns,
            solo_ns=found.solo_ns,
            solo_high_ns=found.solo_high_ns,
            qos_target_ns=int(self._catalogue.factor_of(entry) * found.solo_ns),
            budget_bytes=sum(budgets_bytes),
            fit_count=sum(size // max(1, found.reserve_bytes) for size in budgets_bytes),
            output_bytes=found.output_bytes,
            workspace_bytes=found.workspace_bytes,
            peak_where=found.peak_where,
            warning=found.warning,
        )


def _counts(entry: ModelEntry, num_nodes: int, num_edges: int) -> tuple[int, ...]:
    """Return what the model counts; of several kinds of nodes or edges, equal shares."""
    interface = entry.spec.interface
    return (num_nodes, num_edges) if interface is None else interface.spread(num_nodes, num_edges)
