"""Workloads, arrival processes, and traces to replay.

A workload is a list of tasks (model, graph); arrivals give each a time; a trace is both, written
down, so that every system under comparison sees the same. Pure: no clock, and randomness comes
from the seed only. Graphs are named here, not held: ``serve.graphs`` makes them.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from serve.errors import ConfigError
from serve.profiles import parse_profile
from serve.undecodable import UNDECODABLE

#: All models of a server or repository.
MIX = "mix"
#: The demo's: the paper's three, and GAT.
MODELS = ("gcn", "sage", "gin", "gat")
#: One list of tasks per model, and one sampled from all of them.
WORKLOADS = (*MODELS, MIX)
#: Tasks in a list: 4 datasets of 25 subgraphs each.
TASKS_PER_LIST = 100
#: The dataset name of graphs made on the spot; their index is the generator's seed.
RANDOM = "random"
#: The same with exactly the edges that are asked for, of requests that a server recorded.
RECORDED = "recorded"

_FORMAT = "gnnserve-trace-1"
_NS_PER_S = 1_000_000_000
RowT = TypeVar("RowT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, order=True)
class GraphRef:
    """A graph by name: number `index` of a dataset's pool, with its size."""

    dataset: str
    index: int
    num_nodes: int
    num_edges: int


@dataclass(frozen=True, slots=True, order=True)
class WorkloadTask:
    """Content of a request: a model and a graph."""

    model: str
    graph: GraphRef


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recipe for the graphs of a trace; enough to make the same ones again."""

    datasets: tuple[str, ...] = ("pubmed", "artist", "amazon", "reddit")
    count: Annotated[int, Meta(ge=1)] = 25
    #: Apart from the trace's seed, so that runs of several seeds ask about the same graphs.
    seed: int = 0
    scale: Annotated[float, Meta(gt=0, le=1)] = 0.05
    min_nodes: Annotated[int, Meta(ge=1)] = 100
    max_nodes: Annotated[int, Meta(ge=1)] = 8_000
    max_edges: Annotated[int, Meta(ge=0)] = 200_000


class ResidentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recipe for requests by node ids of a graph that the server holds."""

    graph: str
    #: Type of the nodes, in a graph with several.
    node_type: str = ""
    #: As the request parameter; empty for the model's own.
    fanouts: str = ""
    #: Ids are below it; None for the nodes that the graph has when the requests are made.
    num_nodes: Annotated[int, Meta(ge=1)] | None
    #: Fewest and most ids of a request.
    min_ids: Annotated[int, Meta(ge=1)] = 1
    max_ids: Annotated[int, Meta(ge=1)] = 64
    #: Of the ids.
    seed: int = 0

    @property
    def key(self) -> str:
        """What items of a trace name as their dataset: the graph, and all that differs."""
        parts = (("/", self.node_type), ("?", self.fanouts))
        return self.graph + "".join(mark + text for mark, text in parts if text)


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Header of a trace: what it was made from; its first line."""

    format: str = _FORMAT
    workload: str
    seed: int
    #: One of `ARRIVALS`, or `recorded`.
    arrivals: str = "poisson"
    #: Of `slots`: mean number of requests that arrive together. A slot is it ÷ `rate_hz`.
    mean_batch: Annotated[float, Meta(gt=0)] = 1.0
    #: How the rate changes over the run, see ``serve.profiles``; empty for not at all.
    profile: str = ""
    #: Mean arrivals per second, which a profile multiplies.
    rate_hz: Annotated[float, Meta(gt=0)]
    #: Requests kept in flight instead of a rate; the offsets then say nothing.
    in_flight: Annotated[int, Meta(ge=1)] | None = None
    #: Offered load, when the rate was derived from one, with what it was derived from.
    rho: float | None = None
    mean_solo_s: float | None = None
    #: Slots of the server: how many requests execute at once.
    lanes: int | None = None
    pool: PoolSpec = PoolSpec()
    #: Instead of the pool, for requests by node ids: an item's graph is then a list of ids, and its
    #: number of nodes their number.
    resident: ResidentSpec | None = None
    #: Of a recording, whose items are of a resident graph where their dataset is the key of one.
    residents: tuple[ResidentSpec, ...] = ()
    #: Per dataset, the file or generator its graphs came from.
    sources: dict[str, str] = {}


class TraceItem(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Request of a trace; one line."""

    #: Intended send time, from the start of the trace.
    offset_ns: Annotated[int, Meta(ge=0)]
    model: str
    dataset: str
    index: int
    num_nodes: Annotated[int, Meta(ge=1)]
    num_edges: Annotated[int, Meta(ge=0)]
    #: Of whatever else is random about the request, such as a simulated service time.
    seed: int
    #: Absolute QoS target; None: the server's own.
    qos_target_us: Annotated[int, Meta(gt=0)] | None = None
    tenant: str = ""
    #: 0: the server's own.
    priority: Annotated[int, Meta(ge=0)] = 0

    @property
    def graph(self) -> GraphRef:
        """The graph it asks about."""
        return GraphRef(self.dataset, self.index, self.num_nodes, self.num_edges)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of their intended send times."""

    header: TraceHeader
    items: tuple[TraceItem, ...]

    @property
    def duration_s(self) -> float:
        """Offset of the last request."""
        return self.items[-1].offset_ns / _NS_PER_S if self.items else 0.0

    def with_targets(self, target_us: Callable[[TraceItem], int]) -> "Trace":
        """Return the same requests with absolute QoS targets."""
        items = (msgspec.structs.replace(i, qos_target_us=target_us(i)) for i in self.items)
        return Trace(self.header, tuple(items))

    def at_speed(self, speed: float) -> "Trace":
        """Return the same requests `speed` times as fast after each other."""
        items = (
            msgspec.structs.replace(one, offset_ns=round(one.offset_ns / speed))
            for one in self.items
        )
        header = msgspec.structs.replace(self.header, rate_hz=self.header.rate_hz * speed)
        return Trace(header, tuple(items))

    def encode(self) -> bytes:
        """Return JSON lines: the header, then one line per item."""
        return b"".join(msgspec.json.encode(row) + b"\n" for row in (self.header, *self.items))

    @classmethod
    def decode(cls, data: bytes, where: str = "trace") -> "Trace":
        """Return the trace that `encode` wrote; raise ConfigError with `where` and the line."""
        lines = data.splitlines()
        if not lines:
            raise ConfigError(f"{where}: empty; a header line is wanted")
        header = decode_line(lines[0], TraceHeader, where, 1)
        if header.format != _FORMAT:
            raise ConfigError(f"{where}, line 1: format {header.format!r} is not {_FORMAT!r}")
        items = tuple(decode_line(row, TraceItem, where, n) for n, row in enumerate(lines[1:], 2))
        for number, (before, after) in enumerate(pairwise(items), 3):
            if after.offset_ns < before.offset_ns:
                raise ConfigError(f"{where}, line {number}: offset_ns goes back in time")
        return cls(header, items)

    def save(self, path: Path) -> None:
        """Write `encode()` to `path`."""
        path.write_bytes(self.encode())

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read what `save` wrote; raises ConfigError."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        return cls.decode(data, str(path))


def workload_tasks(
    workload: str, pool: Sequence[GraphRef], seed: int, models: Sequence[str] = MODELS
) -> tuple[WorkloadTask, ...]:
    """Return the list of tasks of `workload`, in random order.

    A model's list holds each graph of the pool once (the paper: 4 × 25 = 100 tasks); `mix` samples
    `TASKS_PER_LIST` from the lists of all `models`, and weights such as `gcn=3,sage=1` give each
    model its share of as many. Raises ConfigError for an unknown workload.
    """
    if weights := parse_weights(workload):
        return _weighted_tasks(weights, pool, seed, models)
    if workload != MIX and workload not in models:
        raise ConfigError(f"workload '{workload}' is not one of {', '.join((*models, MIX))}")
    if not pool:
        raise ConfigError("a workload needs at least one graph")
    rng = random.Random(f"tasks {workload} {seed}")
    asked = models if workload == MIX else (workload,)
    tasks = [WorkloadTask(model, graph) for model in asked for graph in sorted(pool)]
    size = min(TASKS_PER_LIST, len(tasks)) if workload == MIX else len(tasks)
    return tuple(rng.sample(tasks, size))


def parse_weights(workload: str, what: str = "workload") -> dict[str, float]:
    """Return the weights of a workload such as `gcn=3,sage=1`; empty for another one.

    `what` is what an error calls it. Raises ConfigError for weights that are no numbers above 0,
    and for a name given twice.
    """
    if "=" not in workload:
        return {}
    weights: dict[str, float] = {}
    for part in workload.split(","):
        name, mark, text = part.strip().partition("=")
        try:
            weight = float(text) if mark else 1.0
        except ValueError:
            weight = 0.0
        if not name or name in weights or not 0 < weight < math.inf:
            raise ConfigError(
                f"{what} '{workload}': '{part.strip()}' is not NAME=WEIGHT with a weight above 0"
                " and each name once"
            )
        weights[name] = weight
    return weights


def _weighted_tasks(
    weights: dict[str, float], pool: Sequence[GraphRef], seed: int, models: Sequence[str]
) -> tuple[WorkloadTask, ...]:
    """Return at least `TASKS_PER_LIST` tasks, of each model its share and at least one."""
    for name in weights:
        if name not in models:
            raise ConfigError(f"workload: model '{name}' is not one of {', '.join(models)}")
    if not pool:
        raise ConfigError("a workload needs at least one graph")
    rng = random.Random(f"tasks {sorted(weights.items())} {seed}")
    # The rarest model has one task at least; more tasks make the shares exact enough.
    least = min(weights.values()) / sum(weights.values())
    size = min(100 * TASKS_PER_LIST, max(TASKS_PER_LIST, math.ceil(10 / least)))
    names, shares = list(weights), list(weights.values())
    counts = {name: max(1, int(size * w / sum(shares))) for name, w in weights.items()}
    short = sorted(names, key=lambda n: int(size * weights[n] / sum(shares)) - size * weights[n])
    for name in short[: max(0, size - sum(counts.values()))]:
        counts[name] += 1
    tasks = []
    for name, count in counts.items():
        graphs = sorted(pool)
        drawn: list[GraphRef] = []
        while len(drawn) < count:
            drawn += rng.sample(graphs, min(len(graphs), count - len(drawn)))
        tasks += [WorkloadTask(name, graph) for graph in drawn]
    rng.shuffle(tasks)
    return tuple(tasks)


def rate_for_rho(rho: float, mean_solo_s: float, slots: int) -> float:
    """Return the arrivals per second that offer `rho` = rate × mean solo time ÷ slots."""
    if rho <= 0 or mean_solo_s <= 0 or slots < 1:
        raise ConfigError(f"rho {rho} > 0, mean solo time {mean_solo_s} s > 0, slots {slots} >= 1")
    return rho * slots / mean_solo_s


def poisson_arrivals(
    rate_hz: float,
    rng: random.Random,
    *,
    duration_s: float | None = None,
    count: int | None = None,
) -> Iterator[int]:
    """Yield offsets in ns of a Poisson process, until `count` or `duration_s`, if given."""
    return _limited(_poisson_gaps(rate_hz, rng), duration_s, count)


def bursty_arrivals(
    rate_hz: float,
    rng: random.Random,
    *,
    duration_s: float | None = None,
    count: int | None = None,
    on_s: float = 0.5,
    off_s: float = 1.5,
) -> Iterator[int]:
    """Yield arrivals as `poisson_arrivals` does, at the same mean rate, but in bursts.

    Both last an exponential time with means `on_s` and `off_s` (an interrupted Poisson process).
    """
    return _limited(
        _bursty_gaps(rate_hz * (on_s + off_s) / on_s, rng, on_s, off_s), duration_s, count
    )


def even_arrivals(
    rate_hz: float,
    rng: random.Random,
    *,
    duration_s: float | None = None,
    count: int | None = None,
) -> Iterator[int]:
    """Yield arrivals as `poisson_arrivals` does, but at equal distances from a random first."""
    gaps = chain((rng.random() / rate_hz,), repeat(1 / rate_hz))
    return _limited(gaps, duration_s, count)


def slot_arrivals(
    rate_hz: float,
    rng: random.Random,
    *,
    duration_s: float | None = None,
    count: int | None = None,
    mean_batch: float = 1.0,
) -> Iterator[int]:
    """Yield arrivals at the same mean rate, all at the beginnings of slots.

    Each slot of `mean_batch` ÷ `rate_hz` seconds has a Poisson number of arrivals, of mean
    `mean_batch`, none included: "the number of tasks that arrive at one time" of GNNSched.
    """
    slot_ns = max(1, round(mean_batch / rate_hz * _NS_PER_S))
    # A slot's share of a Poisson process is such a number.
    for offset in poisson_arrivals(rate_hz, rng, duration_s=duration_s, count=count):
        yield offset - offset % slot_ns


ARRIVALS: dict[str, Callable[..., Iterator[int]]] = {
    "poisson": poisson_arrivals,
    "bursty": bursty_arrivals,
    "even": even_arrivals,
    "slots": slot_arrivals,
}


def build_trace(
    header: TraceHeader,
    tasks: Sequence[WorkloadTask],
    *,
    duration_s: float | None = None,
    count: int | None = None,
) -> Trace:
    """Return the requests of `tasks`, over and over in random orders, at the header's arrivals.

    Ends after `count` requests or `duration_s`; one of them must be given.
    """
    if duration_s is None and count is None:
        raise ConfigError("a trace needs a duration or a number of requests")
    # Through the codec: checks the ranges, and makes floats of integers, as reading it back does.
    header = decode_line(msgspec.json.encode(header), TraceHeader, "trace header", 1)
    if header.arrivals not in ARRIVALS:
        raise ConfigError(f"arrivals '{header.arrivals}' is not one of {', '.join(ARRIVALS)}")
    # Separate streams: the same seed gives the same requests at every rate.
    times = random.Random(f"arrivals {header.seed}")
    rest = random.Random(f"requests {header.seed}")
    profile = parse_profile(header.profile, duration_s)
    base_s = None if duration_s is None else profile.worked_s(duration_s)
    batch = {"mean_batch": header.mean_batch} if header.arrivals == "slots" else {}
    arrivals = ARRIVALS[header.arrivals]
    offsets = arrivals(header.rate_hz, times, duration_s=base_s, count=count, **batch)
    items = (
        TraceItem(
            offset_ns=round(profile.at_s(offset / _NS_PER_S) * _NS_PER_S)
            if header.profile
            else offset,
            model=task.model,
            dataset=task.graph.dataset,
            index=task.graph.index,
            num_nodes=task.graph.num_nodes,
            num_edges=task.graph.num_edges,
            seed=rest.getrandbits(31),
        )
        for offset, task in zip(offsets, _endless(tasks, header.seed), strict=False)
    )
    return Trace(header, tuple(items))


def _endless(tasks: Sequence[WorkloadTask], seed: int) -> Iterator[WorkloadTask]:
    """Yield the list as given, then reshuffled for every further round."""
    rng = random.Random(f"rounds {seed}")
    order = list(tasks)
    while True:
        yield from order
        rng.shuffle(order)


def _poisson_gaps(rate_hz: float, rng: random.Random) -> Iterator[float]:
    while True:
        yield rng.expovariate(rate_hz)


def _bursty_gaps(rate_hz: float, rng: random.Random, on_s: float, off_s: float) -> Iterator[float]:
    silence = 0.0
    left = rng.expovariate(1 / on_s)
    while True:
        gap = rng.expovariate(rate_hz)
        while gap > left:
            # The burst ends first; an exponential gap has no memory, so it is drawn anew.
            silence += left + rng.expovariate(1 / off_s)
            left = rng.expovariate(1 / on_s)
            gap = rng.expovariate(rate_hz)
        left -= gap
        yield silence + gap
        silence = 0.0


def _limited(gaps_s: Iterator[float], duration_s: float | None, count: int | None) -> Iterator[int]:
    end_s = math.inf if duration_s is None else duration_s
    at_s = 0.0
    for number, gap in enumerate(gaps_s):
        at_s += gap
        if at_s >= end_s or number == count:
            return
        yield round(at_s * _NS_PER_S)


def decode_line(row: bytes, kind: type[RowT], where: str, number: int) -> RowT:
    """Decode a line of JSON; raises ConfigError that names `where` and the line's number."""
    try:
        return msgspec.json.decode(row, type=kind)
    except UNDECODABLE as error:
        raise ConfigError(f"{where}, line {number}: {error}") from error
