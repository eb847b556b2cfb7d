"""Recorded requests of a server: what was asked and when, so that it can be asked again.

JSON lines: a header, then one line per request in the order of their ends. Sizes and times only:
features and ids may be in a file beside it, see ``serve.payloads``. ``serve.obs.recorder`` writes
recordings; this is the format, and how a recording becomes a trace. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from serve.errors import ConfigError
from serve.undecodable import UNDECODABLE
from serve.workload import (
    RECORDED,
    PoolSpec,
    ResidentSpec,
    Trace,
    TraceHeader,
    TraceItem,
    decode_line,
)

_FORMAT = "gnnserve-recording-1"
#: Different graphs that are made for requests of equal sizes.
_GRAPHS_OF_A_SIZE = 16
_NS_PER_S = 1_000_000_000


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a recording."""

    format: str = _FORMAT
    #: Wall clock at the start of the recording, ns since the epoch.
    started_unix_ns: int
    #: Share of the requests that is recorded.
    share: float = 1.0


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that reached the scheduler, and how it ended."""

    #: Arrival by the wall clock, ns since the epoch.
    at_ns: int
    uid: str = ""
    model: str
    version: str = ""
    tenant: str = ""
    priority: int = 0
    #: Of the graph, or of the sample where a resident graph was asked.
    nodes: Annotated[int, Meta(ge=1)]
    edges: Annotated[int, Meta(ge=0)] = 0
    #: Resident graph, number of ids, their type, and fan-outs as a request writes them.
    graph: str = ""
    ids: Annotated[int, Meta(ge=0)] = 0
    node_type: str = ""
    fanouts: str = ""
    seed: int | None = None
    target_us: Annotated[int, Meta(ge=0)] = 0
    #: Common to the parts of a joint request.
    joint: str = ""
    status: str = "OK"
    latency_us: int = 0
    late: bool = False


@dataclass(frozen=True, slots=True)
class TrafficRecording:
    """A recording that was read; requests in the order of their arrivals."""

    header: RecordingHeader
    requests: tuple[RecordedRequest, ...]

    @property
    def late_share(self) -> float:
        """Share of the recorded answers that were late; 0 without answers."""
        answered = [one.late for one in self.requests if one.status == "OK"]
        return sum(answered) / len(answered) if answered else 0.0

    @classmethod
    def decode(cls, data: bytes, where: str = "recording") -> "TrafficRecording":
        """Read a recording; raises ConfigError with `where` and the line.

        A last line without its end is left out: the server was writing it when the file was read.
        """
        lines = data.split(b"\n")[:-1]
        if not lines:
            raise ConfigError(f"{where}: empty; a header line is wanted")
        header = decode_line(lines[0], RecordingHeader, where, 1)
        if header.format != _FORMAT:
            raise ConfigError(f"{where}, line 1: format {header.format!r} is not {_FORMAT!r}")
        rows = [decode_line(row, RecordedRequest, where, n) for n, row in enumerate(lines[1:], 2)]
        if not rows:
            raise ConfigError(f"{where}: it holds no request")
        return cls(header, tuple(sorted(rows, key=lambda one: one.at_ns)))

    def trace(self, *, sampled: bool = False) -> Trace:
        """Return the requests as a trace, whose first one is due at once.

        Targets are those of the recording, tenants and priorities too. Parts of a joint request
        are requests of their own. A request for nodes of a resident graph asks for as many ids;
        with `sampled` it brings a graph of the sample's size instead, for a simulation.
        """
        first_ns = self.requests[0].at_ns
        residents = () if sampled else _residents(self.requests)
        spec_of = {_key(spec.graph, spec.node_type, spec.fanouts): spec.key for spec in residents}
        items = tuple(
            _item(number, one, first_ns, spec_of) for number, one in enumerate(self.requests)
        )
        length_s = max(1, items[-1].offset_ns) / _NS_PER_S
        header = TraceHeader(
            workload=RECORDED,
            seed=0,
            arrivals=RECORDED,
            rate_hz=len(items) / length_s,
            pool=PoolSpec(datasets=()),
            residents=residents,
        )
        return Trace(header, items)


def is_recording(first_line: bytes) -> bool:
    """Return True for the first line of a recording of any version."""
    try:
        header = msgspec.json.decode(first_line, type=_AnyHeader)
    except UNDECODABLE:
        return False
    return header.format.startswith("gnnserve-recording-")


def read_trace(path: Path, *, sampled: bool = False) -> Trace:
    """Return the trace in a file, or that of a recording; raises ConfigError.

    `sampled` is as in ``TrafficRecording.trace``.
    """
    data = _read(path)
    if is_recording(data.partition(b"\n")[0]):
        return TrafficRecording.decode(data, str(path)).trace(sampled=sampled)
    return Trace.decode(data, str(path))


def recorded_requests(path: Path) -> tuple[RecordedRequest, ...]:
    """Return the requests of a recording in the order of its trace; raises ConfigError."""
    return TrafficRecording.decode(_read(path), str(path)).requests


def late_when_recorded(path: Path) -> float | None:
    """Return the share of late answers in a recording; None for a trace. Raises ConfigError."""
    data = _read(path)
    if not is_recording(data.partition(b"\n")[0]):
        return None
    return TrafficRecording.decode(data, str(path)).late_share


class _AnyHeader(msgspec.Struct):
    format: str = ""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _key(*parts: str) -> str:
    return "\0".join(parts)


def _residents(requests: Iterable[RecordedRequest]) -> tuple[ResidentSpec, ...]:
    """Return one spec for each graph, type of nodes and fan-outs that were asked for."""
    numbers: dict[tuple[str, str, str], list[int]] = {}
    for one in requests:
        if one.graph and one.ids:
            numbers.setdefault((one.graph, one.node_type, one.fanouts), []).append(one.ids)
    return tuple(
        ResidentSpec(
            graph=graph,
            node_type=node_type,
            fanouts=fanouts,
            # Ids are drawn from the graph as it is at the replay.
            num_nodes=None,
            min_ids=min(ids),
            max_ids=max(ids),
        )
        for (graph, node_type, fanouts), ids in sorted(numbers.items())
    )


def _item(number: int, one: RecordedRequest, first_ns: int, spec_of: dict[str, str]) -> TraceItem:
    dataset = spec_of.get(_key(one.graph, one.node_type, one.fanouts)) if one.ids else None
    return TraceItem(
        offset_ns=one.at_ns - first_ns,
        model=one.model,
        dataset=dataset or RECORDED,
        # Graphs of equal sizes are few, so that a long recording is not as many messages.
        index=number if dataset else number % _GRAPHS_OF_A_SIZE,
        num_nodes=one.ids if dataset else one.nodes,
        num_edges=0 if dataset else one.edges,
        seed=number,
        qos_target_us=one.target_us or None,
        tenant=one.tenant,
        priority=one.priority,
    )
