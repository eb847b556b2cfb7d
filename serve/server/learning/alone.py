"""Requests that the server sends itself at start, to learn the time of a request alone.

They pass through the transport and its codec like all requests, so that the promised times include
both. They come with pauses: on a server with little to do, cores are slower at first, until caches,
kernels and clock frequency recover. Requests back to back would promise times that no lone request
reaches.
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
from serve.graphs.random_inputs import declared_inputs, random_inputs
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
#: The last argument is the client id by which the engine knows its own requests.
Send = Callable[[str, Arrays, str], object]

#: A request shows a solo time when the server was idle for so long before it, and it stays alone.
IDLE_NS = Nanos(10_000_000)
#: Nodes of the graphs sent, as far as `PROBE_BYTES` allow, and edges for each node.
PROBE_NODES = (16, 1024, 8192)
PROBE_EDGES_PER_NODE = 10
PROBE_BYTES = 8 << 20
_SOME_NODES = 1000
#: Upper bound of a run on a graph but the smallest: longer ones would delay the start.
_LONGEST_NS = 100_000_000
#: Time after which a `LoneRequests.send` begins no request. Traffic teaches what is missing then.
SEND_NS = Nanos(750_000_000)
#: Repetitions of each observation for the estimators, which move by small steps because they are
#: made for a stream of noisy runs.
LESSONS = 20


class LoneRequests:
    """Requests to every model, one by one with pauses, and their records.

    Models take turns, so that no run finds the caches as the model's own last run left them.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        ask: Callable[[str, Arrays], RequestRecord],
        largest_bytes: int,
    ) -> None:
        """Make the requests; none is larger than `largest_bytes`.

        `ask` sends a request and returns its record. A request that ends in a ServeError teaches
        nothing and is not sent again.
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
        """Send each request `times` times, or as often as `SEND_NS` allow, from the smallest on.

        The estimates learn from the runs as they end.
        """
        until_ns = clock.now_ns() + SEND_NS
        for _ in range(times):
            for key, (entry, size, tensors) in list(self._probes.items()):
                if clock.now_ns() > until_ns:
                    _log.info("timing lone requests: stopped after %g s", SEND_NS / 1e9)
                    return
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

        The overhead is common to all models, and taken from the fastest, whose runs add the least
        noise.
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
        largest = seen[-1][1]
        fastest, *_ = min(
            seen, key=lambda one: one[0].estimator.run_ns(*probe_counts(one[0], *largest))
        )
        overhead.calibrate(
            [
                (
                    fastest.estimator.input_bytes(*(counts := probe_counts(entry, *size))),
                    solo_ns - int(fastest.estimator.fitted_ns(*counts)),
                )
                for entry, size, _, solo_ns in seen
                if entry is fastest
            ]
        )
        for _ in range(LESSONS):
            for entry, size, run_ns, solo_ns in seen:
                entry.estimator.observe_typical(probe_counts(entry, *size), run_ns, solo_ns)


def shows_solo_time(record: RequestRecord) -> bool:
    """Return True when the latency is that of a request alone, at its first attempt."""
    return record.alone and record.status == "OK" and record.attempt == 1


def _sizes(entry: ModelEntry, largest_bytes: int) -> list[tuple[int, int]]:
    """Return (nodes, edges) of the graphs sent to a model, in rising order."""
    inputs = entry.estimator.calibration.memory.inputs
    # For enough nodes that each kind of them has some.
    some = probe_counts(entry, _SOME_NODES, PROBE_EDGES_PER_NODE * _SOME_NODES)
    most = max(1, int(_SOME_NODES * largest_bytes / inputs.at(*some)))
    chosen = sorted({min(num_nodes, most) for num_nodes in PROBE_NODES})
    first, *others = [(num_nodes, PROBE_EDGES_PER_NODE * num_nodes) for num_nodes in chosen]

    def is_short(size: tuple[int, int]) -> bool:
        return entry.estimator.run_ns(*probe_counts(entry, *size)) <= _LONGEST_NS

    return [first, *filter(is_short, others)]


def probe_counts(entry: ModelEntry, num_nodes: int, num_edges: int) -> tuple[int, ...]:
    """Return the model's counts for a graph of that size, as `probe_tensors` makes it."""
    interface = entry.spec.interface
    return (num_nodes, num_edges) if interface is None else interface.spread(num_nodes, num_edges)


def counts_of(entry: ModelEntry, num_nodes: int, num_edges: int) -> tuple[int, ...] | None:
    """Return the model's counts for a request of that size; None where more counts are needed."""
    interface = entry.spec.interface
    if entry.estimator.counts_graphs or (interface and not interface.is_simple):
        return None
    return probe_counts(entry, num_nodes, num_edges)


def probe_tensors(entry: ModelEntry, num_nodes: int, num_edges: int) -> Arrays:
    """Return every input that the model takes, for a random graph."""
    rng = np.random.default_rng(num_nodes)
    if (interface := entry.spec.interface) is not None:
        return declared_inputs(interface, interface.spread(num_nodes, num_edges), rng)
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
    """Return the request for such a graph, as the transport would hand it over."""
    return call_of(entry.spec.name, probe_tensors(entry, num_nodes, num_edges))


def call_of(model: str, tensors: Arrays, client_id: str = "") -> InferCall:
    """Return a request that came by no transport and arrived just now."""
    wired = {
        name: Tensor(datatype_of(array), array.shape, array.tobytes())
        for name, array in tensors.items()
    }
    return InferCall(model, "", wired, clock.now_ns(), client_id)
