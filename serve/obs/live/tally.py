"""Requests of one bucket of time, added up."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from serve.obs.live.bins import bin_of, packed, shortened
from serve.obs.record import RequestRecord

#: Kinds of rows in the table: everything, a version of a model, a tenant.
ALL, MODEL, TENANT = "all", "model", "tenant"
#: Name of the row that stands for all that have no row of their own.
OTHERS = ""
#: Most rows of a kind in one bucket; the smaller ones are added to `OTHERS`.
MOST_NAMES = {ALL: 1, MODEL: 48, TENANT: 32}
#: Prefixes of labels: causes of late answers, reasons of requests without a result.
LATE, NONE = "late:", "none:"

#: Kind, name and version.
Key = tuple[str, str, str]
#: Columns of the table after width, start and key, in order.
COLUMNS = ("requests", "answered", "late", "run_ns", "longest_ns", "labels", "latency", "over",
           "queue", "reserved_bytes", "lanes_up")  # fmt: skip


class ServerState(msgspec.Struct, frozen=True):
    """State of a server at one moment, or the extremes of several."""

    #: Requests accepted and not yet launched; the most.
    queue: int
    #: Memory that running tasks reserve; the most.
    reserved_bytes: int
    #: Lanes that can take a task; the fewest.
    lanes_up: int

    def with_other(self, other: "ServerState | None") -> "ServerState":
        """Return the extremes of both."""
        if other is None:
            return self
        return ServerState(
            max(self.queue, other.queue),
            max(self.reserved_bytes, other.reserved_bytes),
            min(self.lanes_up, other.lanes_up),
        )


class Tally:
    """Sums over requests: counts, labels, and the distributions of two ratios."""

    __slots__ = (
        "answered",
        "labels",
        "late",
        "latency",
        "longest_ns",
        "over",
        "requests",
        "run_ns",
    )

    def __init__(self) -> None:
        self.requests = self.answered = self.late = self.run_ns = self.longest_ns = 0
        self.labels: dict[str, int] = {}
        #: Answers by the bin of their latency in ms, and of latency ÷ target.
        self.latency: dict[int, int] = {}
        self.over: dict[int, int] = {}

    def add(self, record: RequestRecord, latency_bin: int, over_bin: int) -> None:
        """Add a request, and those that its record stands for."""
        count = 1 + record.left_out
        self.requests += count
        self.run_ns += record.run_ns
        if record.latency_ns > self.longest_ns:
            self.longest_ns = record.latency_ns
        if record.status == "OK":
            self.answered += 1
            self.latency[latency_bin] = self.latency.get(latency_bin, 0) + 1
            self.over[over_bin] = self.over.get(over_bin, 0) + 1
            if not record.violated:
                return
            self.late += 1
            label = LATE + record.cause
        else:
            label = NONE + (record.reason or record.status.lower())
        self.labels[label] = self.labels.get(label, 0) + count

    def merge(self, other: "Tally") -> None:
        """Add what another has."""
        self.requests += other.requests
        self.answered += other.answered
        self.late += other.late
        self.run_ns += other.run_ns
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        for mine, theirs in (
            (self.labels, other.labels),
            (self.latency, other.latency),
            (self.over, other.over),
        ):
            _add(mine, theirs)

    def row(self, state: ServerState | None) -> tuple[Any, ...]:
        """Return the values of `COLUMNS`."""
        held = (None, None, None) if state is None else msgspec.structs.astuple(state)
        labels = msgspec.json.encode(self.labels).decode()
        return (self.requests, self.answered, self.late, self.run_ns, self.longest_ns, labels,
                packed(self.latency), packed(self.over), *held)  # fmt: skip


class Second:
    """Requests that ended in one second, by key."""

    def __init__(self) -> None:
        self._tallies: dict[Key, Tally] = {}
        self.state: ServerState | None = None
        #: It has what the database lacks.
        self.changed = True

    def add(self, record: RequestRecord) -> None:
        """Add a request."""
        self.changed = True
        target_ns = record.qos_target_ns
        latency_bin = bin_of(record.latency_ns / 1e6)
        over_bin = bin_of(record.latency_ns / target_ns) if target_ns > 0 else 0
        # Clients can make up any number of unknown models.
        known = record.status != "NOT_FOUND"
        model = (MODEL, record.model, record.version) if known else (MODEL, OTHERS, "")
        keys = [(ALL, "", ""), model]
        if record.tenant:
            keys.append((TENANT, record.tenant, ""))
        for key in keys:
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[key] = Tally()
            tally.add(record, latency_bin, over_bin)

    def tell(self, state: ServerState) -> None:
        """Take the state of the server in this second."""
        self.changed = True
        self.state = state.with_other(self.state)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows: key, then `COLUMNS`."""
        tallies = dict(self._tallies)
        tallies.setdefault((ALL, "", ""), Tally())
        for kind, most in MOST_NAMES.items():
            mine = [(key, tally) for key, tally in tallies.items() if key[0] == kind]
            mine.sort(key=lambda item: (item[0][1] == OTHERS, -item[1].requests))
            rest = Tally()
            for _, tally in mine[most:]:
                rest.merge(tally)
            for key, tally in mine[:most]:
                yield *key, *tally.row(self.state if kind == ALL else None)
            if rest.requests:
                yield kind, OTHERS, "", *rest.row(None)


def joined(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return one row for each key of `rows`, which are keys and `COLUMNS`, at most `MOST_NAMES`."""
    found: dict[Key, list[tuple[Any, ...]]] = {}
    for row in rows:
        found.setdefault(row[:3], []).append(row[3:])
    ranked = sorted(found.items(), key=lambda item: -sum(row[0] for row in item[1]))
    places = dict(MOST_NAMES)
    kept: dict[Key, list[tuple[Any, ...]]] = {}
    for key, parts in ranked:
        if key[1] == OTHERS or places[key[0]] > 0:
            places[key[0]] -= key[1] != OTHERS
            kept.setdefault(key, []).extend(parts)
        else:
            kept.setdefault((key[0], OTHERS, ""), []).extend(parts)
    return [(*key, *_joined(parts)) for key, parts in kept.items()]


def _joined(parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    if len(parts) == 1:
        return parts[0]
    columns = dict(zip(COLUMNS, zip(*parts, strict=True), strict=True))
    labels: dict[str, int] = {}
    for text in set(columns["labels"]) - {"{}"}:
        times = columns["labels"].count(text)
        for label, count in msgspec.json.decode(text, type=dict[str, int]).items():
            labels[label] = labels.get(label, 0) + times * count
    return (
        *(sum(columns[name]) for name in ("requests", "answered", "late", "run_ns")),
        max(columns["longest_ns"]),
        msgspec.json.encode(labels).decode(),
        shortened(b"".join(columns["latency"])),
        shortened(b"".join(columns["over"])),
        _extreme(max, columns["queue"]),
        _extreme(max, columns["reserved_bytes"]),
        _extreme(min, columns["lanes_up"]),
    )


def _extreme(which: Any, values: Iterable[int | None]) -> int | None:
    found: int | None = which((value for value in values if value is not None), default=None)
    return found


def _add(mine: dict[Any, int], theirs: dict[Any, int]) -> None:
    for key, count in theirs.items():
        mine[key] = mine.get(key, 0) + count


def label_counts(texts: Iterable[str], prefix: str) -> Counter[str]:
    """Return the sums of the labels with this prefix, by the rest of their names."""
    found = Counter[str]()
    for text, times in Counter(texts).items():
        for label, count in msgspec.json.decode(text, type=dict[str, int]).items():
            if label.startswith(prefix):
                found[label.removeprefix(prefix)] += times * count
    return found
