"""Requests the server sends itself at start, to learn what one takes alone.

They go the way of all requests, through the transport and its codec: whatever a first request
meets there is in what it is promised. A server that gets a request now and then runs it on cores
that had nothing to do for a while, and these are slower at first: kernels, caches and clock have to
come back. Requests sent back to back would promise times that no lone request ever sees.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from serve.core.types import Nanos
from serve.errors import ServeError
from serve.estimate import Overhead
from serve.graphs.random_inputs import random_inputs
from serve.inputs import Size as SizeName
from serve.obs.record import RequestRecord
from serve.server import clock
from serve.server.api import InferCall, Tensor
from serve.server.catalogue import ModelEntry
from serve.wire.messages import datatype_of

_log = logging.getLogger(__name__)

Size = tuple[int, int]
Arrays = Mapping[str, np.ndarray[Any, np.dtype[Any]]]
#: Sends a request to a model and returns when it is answered; raises the ServeError it ends in.
#: The last argument is its id, by which the engine knows its own.
Send = Callable[[str, Arrays, str], object]

#: A request that comes after so long with nothing to do, and stays alone, shows a solo time.
IDLE_NS = Nanos(10_000_000)
#: Nodes of the graphs sent, with 10 edges a node, as far as their features leave room.
PROBE_NODES = (16, 1024, 8192)
PROBE_EDGES_PER_NODE = 10
PROBE_BYTES = 8 << 20
#: What was seen of each size is told so often: corrections, made for a stream of noisy runs, move
#: by small steps.
LESSONS = 20


class LoneRequests:
    """Requests to every model, one by one with pauses, and what they took.

    Models take turns, as none finds the caches as its own last run has left them.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        ask: Callable[[str, Arrays], RequestRecord],
        largest_bytes: int,
    ) -> None:
        """`ask` returns what became of a request, which takes no more than `largest_bytes`.

        One that ends in a ServeError says nothing, and is not sent again.
        """
        self._ask = ask
        sizes = {entry.key: _sizes(entry, min(PROBE_BYTES, largest_bytes)) for entry in entries}
        self._probes = {
            (entry.key, size): (entry, size, probe_tensors(entry, *size))
            for turn in range(len(PROBE_NODES))
            for entry in entries
            for size in sizes[entry.key][turn : turn + 1]
        }
        self._seen: dict[tuple[str, Size], list[RequestRecord]] = {key: [] for key in self._probes}

    def send(self, times: int) -> None:
        """Send each so often; their runs are learned from as they end."""
        for _ in range(times):
            for key, (entry, size, tensors) in list(self._probes.items()):
                threading.Event().wait(IDLE_NS / 1e9)
                try:
                    record = self._ask(entry.spec.name, tensors)
                except ServeError as error:
                    del self._probes[key]
                    _log.warning(
                        "model %s is not timed on %d nodes and %d edges: %s",
                        entry.key, *size, error,
                    )  # fmt: skip
                    continue
                if shows_solo_time(record):
                    self._seen[key].append(record)

    def teach(self, overhead: Overhead) -> None:
        """Calibrate `overhead`, then correct each model's times, by medians.

        What all models have in common is asked of the fastest: there is less noise from its runs.
        """
        seen = [
            (
                entry,
                size,
                int(median(record.run_ns for record in self._seen[key])),
                int(median(record.latency_ns for record in self._seen[key])),
            )
            for key, (entry, size, _) in self._probes.items()
            if self._seen[key]
        ]
        if not seen:
            return
        fastest, *_ = min(seen, key=lambda one: one[0].estimator.run_ns(*seen[-1][1]))
        inputs = fastest.estimator.calibration.memory.inputs
        overhead.calibrate(
            [
                (int(inputs.at(*size)), solo_ns - int(fastest.estimator.fitted_ns(*size)))
                for entry, size, _, solo_ns in seen
                if entry is fastest
            ]
        )
        for _ in range(LESSONS):
            for entry, size, run_ns, solo_ns in seen:
                entry.estimator.observe_typical(*size, run_ns, solo_ns)


def shows_solo_time(record: RequestRecord) -> bool:
    """Whether its latency is what such a request takes alone."""
    return record.alone and record.status == "OK" and record.attempt == 1


def _sizes(entry: ModelEntry, largest_bytes: int) -> list[tuple[int, int]]:
    """(nodes, edges) of the graphs sent to a model, rising."""
    inputs = entry.estimator.calibration.memory.inputs
    most = max(1, int(largest_bytes / inputs.at(1, PROBE_EDGES_PER_NODE)))
    chosen = sorted({min(num_nodes, most) for num_nodes in PROBE_NODES})
    return [(num_nodes, PROBE_EDGES_PER_NODE * num_nodes) for num_nodes in chosen]


def probe_tensors(entry: ModelEntry, num_nodes: int, num_edges: int) -> Arrays:
    """Return every input that the model takes, for a random graph."""
    rng = np.random.default_rng(num_nodes)
    signature = entry.signature
    sizes: dict[SizeName, int] = {
        "N": num_nodes,
        "E": num_edges,
        "F": signature.num_features,
        "D": signature.edge_dim or 1,
    }
    edges = rng.integers(0, num_nodes, (2, num_edges))
    return random_inputs(entry.spec.inputs, sizes, edges, rng)


def probe_call(entry: ModelEntry, num_nodes: int, num_edges: int) -> InferCall:
    """The request for such a graph, as the transport would hand it over."""
    return call_of(entry.spec.name, probe_tensors(entry, num_nodes, num_edges))


def call_of(model: str, tensors: Arrays, client_id: str = "") -> InferCall:
    """A request that came by no transport, just now."""
    wired = {
        name: Tensor(datatype_of(array), array.shape, array.tobytes())
        for name, array in tensors.items()
    }
    return InferCall(model, "", wired, clock.now_ns(), client_id)
