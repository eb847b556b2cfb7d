"""Checks the record of a chaos run; shares no code with the server, nor with what wrote the record.

    python bench/chaos/checker.py FOLDER

Reads the files that ``history`` names, ``expected.npz`` and the report's database. Prints what must
hold and what was found, and exits with 1 when something does not hold.
"""

import base64
import json
import re
import sqlite3
import sys
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

S = 1_000_000_000
#: Largest difference of an answer from plain PyG's, as a share of the output's scale.
TOLERANCE = 1e-4
#: A killed process loses the rows of its last second; and as much again for a busy machine.
ROWS_LOST_S = 2.0
#: After a restart clients try to connect again within this time.
RECONNECT_S = 3.0
#: Longest time that `ready` may say 200 though the gRPC port does not answer.
UNNOTICED_S = 15.0
#: Fewer calls than this in one life of the server say nothing about leaks.
ENOUGH_CALLS = 20_000
#: Most growth per 10,000 calls over the last 80 % of a life.
GROWTH = {"rss_bytes": 0.5 * 2**20, "fds": 1.0, "threads": 1.0, "lanes_rss_bytes": 2**20}
#: Share of requests that may have another status in the report than at the client.
OTHER_STATUS = 1e-4
LONGEST_WAIT_S = 10.0

_REFUSED = {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
#: Statuses that a kind of request may end with.
STATUSES = {
    "tensors": {"OK"} | _REFUSED,
    "nodes": {"OK"} | _REFUSED,
    "region": {"OK"} | _REFUSED,
    "streamed": {"OK"} | _REFUSED,
    "cancelled": {"OK", "CANCELLED"} | _REFUSED,
    "deadline": {"OK", "DEADLINE_EXCEEDED"} | _REFUSED,
    "timeout": {"OK", "DEADLINE_EXCEEDED"} | _REFUSED,
    "invalid": {"INVALID_ARGUMENT"} | _REFUSED,
    "unknown": {"NOT_FOUND"} | _REFUSED,
    "bad": {"INTERNAL", "DEADLINE_EXCEEDED"} | _REFUSED,
    "bad_well": {"OK", "DEADLINE_EXCEEDED"} | _REFUSED,
}
#: Reasons that the report gives for UNAVAILABLE, by whether the model misbehaves.
_UNAVAILABLE = {"draining", "not_ready", "lane_lost"}
_UNAVAILABLE_BAD = _UNAVAILABLE | {"quarantined"}
_CLIENT_GAVE_UP = {"CANCELLED", "DEADLINE_EXCEEDED"}


class Finding(NamedTuple):
    """One thing that must hold."""

    name: str
    wanted: str
    found: str
    holds: bool


class Outcome(NamedTuple):
    """How a request ended, as its client saw it."""

    at: int
    status: str
    by_client: bool
    model: str
    version: str
    answer: str
    uid: str
    graph_version: int
    words: str


class Asked(NamedTuple):
    """A request that was sent."""

    at: int
    kind: str
    model: str
    case: int
    ids: tuple[int, ...]
    version: str
    registered: int
    streamed: bool


class Row(NamedTuple):
    """A row of the report's database."""

    run: int
    uid: str
    client_id: str
    status: str
    reason: str
    left_out: int


class Life(NamedTuple):
    """A process of the server: when it was ready, when it was told to end or killed, and how."""

    ready: int
    ended: int
    how: str
    code: int


@dataclass
class Record:
    """Everything that was recorded."""

    folder: Path
    asked: dict[str, Asked] = field(default_factory=dict)
    ended: dict[str, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    #: Rows that each start of the server says it has lost.
    rows_lost: dict[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Read the files of a folder."""
        found = cls(folder)
        for path in sorted(folder.glob("requests-*.jsonl")):
            for line in _lines(path):
                found._take(line)
        for path in sorted(folder.glob("answers-*.jsonl")):
            for line in _lines(path):
                content = np.frombuffer(base64.b64decode(line["content"]), np.float32)
                found.answers[line["hash"]] = content.reshape(line["shape"])
        with closing(sqlite3.connect(f"file:{folder / 'report.db'}?mode=ro", uri=True)) as db:
            names = "run_id, request_uid, client_id, status, reason, left_out"
            found.rows = [Row(*row) for row in db.execute(f"SELECT {names} FROM request")]
            found.rows_lost = dict(db.execute("SELECT run_id, rows_lost FROM server"))
        return found

    def _take(self, line: dict[str, Any]) -> None:
        if "end" not in line:
            self.asked[line["id"]] = Asked(
                line["at"],
                line["kind"],
                line["model"],
                line["case"],
                tuple(line.get("ids", ())),
                line.get("version", ""),
                line.get("registered", 0),
                line.get("streamed", False),
            )
            return
        outcome = Outcome(
            line["end"],
            line["status"],
            line.get("by_client", False),
            line.get("model", ""),
            line.get("version", ""),
            line.get("answer", ""),
            line.get("uid") or "",
            line.get("graph_version") or 0,
            line.get("words", ""),
        )
        self.ended[line["id"]].append(outcome)

    @cached_property
    def faults(self) -> list[dict[str, Any]]:
        """What was done to the server, in order."""
        return list(_lines(self.folder / "faults.jsonl"))

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The server seen from outside, in order."""
        return list(_lines(self.folder / "samples.jsonl"))

    @cached_property
    def end(self) -> dict[str, Any]:
        """How it ended."""
        found: dict[str, Any] = json.loads((self.folder / "end.json").read_text())
        return found

    @cached_property
    def lives(self) -> list[Life]:
        """Processes of the server, in order."""
        return [
            Life(line["ready"], line["ended"], line["how"], line["code"])
            for line in _lines(self.folder / "lives.jsonl")
        ]

    @cached_property
    def graph_versions(self) -> list[tuple[int, int]]:
        """When a change of the held graph was over, and its version then, in order."""
        return [
            (fault["end"], int(match[1]))
            for fault in self.faults
            if fault["name"] == "graph updated"
            and (match := re.fullmatch(r"version (\d+)", fault["said"]))
        ]

    @cached_property
    def rows_of(self) -> dict[str, list[Row]]:
        """Rows by the client's id of the request."""
        found: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            if row.client_id:
                found[row.client_id].append(row)
        return found

    @cached_property
    def pairs(self) -> list[tuple[str, Asked, Outcome]]:
        """Requests with their first outcome."""
        both = ((key, one, self.ended.get(key)) for key, one in self.asked.items())
        return [(key, one, ends[0]) for key, one, ends in both if ends]

    def is_down(self, begin: int, end: int) -> bool:
        """Return True when the server was not serving at some time from `begin` to `end`."""
        slack = round(RECONNECT_S * S)
        gaps = [(a.ended, b.ready + slack) for a, b in pairwise(self.lives)]
        gaps.append((self.lives[-1].ended, begin + end))
        return any(begin <= late and early <= end for early, late in gaps)

    def during(self, name: str, begin: int, end: int, slack_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the faults of a name that overlap with the time from `begin` to `end`."""
        slack = round(slack_s * S)
        return [
            fault
            for fault in self.faults
            if fault["name"] == name
            and fault["at"] - slack <= end
            and begin <= fault["end"] + slack
        ]


def check_outcomes(record: Record) -> Iterator[Finding]:
    """Each request has exactly one outcome, and no answer is anybody else's."""
    none = [key for key in record.asked if key not in record.ended]
    twice = [key for key, ends in record.ended.items() if len(ends) > 1]
    strange = [key for key in record.ended if key not in record.asked]
    yield _none("requests without an outcome", none)
    yield _none("requests answered twice", twice)
    yield _none("answers that nobody asked for", strange)
    uids = Counter(end.uid for _, _, end in record.pairs if end.uid)
    yield _none("uids of two answers", [uid for uid, count in uids.items() if count > 1])


def check_answers(record: Record) -> Iterator[Finding]:
    """Each answer is what plain PyG gives for the model, version and graph that it names."""
    expected = np.load(record.folder / "expected.npz")
    known: dict[tuple[str, tuple[int, ...], str], bool] = {}
    arrays: dict[str, Any] = {}
    wrong, older, compared = [], [], 0
    for key, asked, end in record.pairs:
        if end.status != "OK":
            continue
        compared += 1
        if end.model != asked.model or (asked.version and end.version != asked.version):
            wrong.append(key)
            continue
        name = f"{asked.model}/{end.version}/{asked.case}"
        if asked.kind == "nodes" or asked.ids:
            name = f"{asked.model}/{end.version}/held/{end.graph_version % 4}"
            if end.graph_version < _version_before(record, asked, end):
                older.append(key)
        seen = (name, asked.ids, end.answer)
        if seen not in known:
            if name not in arrays:
                arrays[name] = expected.get(name)
            known[seen] = _equal(record.answers.get(end.answer), arrays[name], asked.ids)
        if not known[seen]:
            wrong.append(key)
    yield Finding("answers compared", "all", f"{compared:,}", compared > 0)
    yield _none("wrong answers", wrong)
    yield _none("answers from a graph older than a change before the request", older)


def _version_before(record: Record, asked: Asked, end: Outcome) -> int:
    """Return the graph's version that the last change before the request has told."""
    at = bisect(record.graph_versions, (asked.at,)) - 1
    if at < 0 or record.is_down(record.graph_versions[at][0], end.at):
        return 0  # every life begins with the first version
    return record.graph_versions[at][1]


def _equal(answer: Any, expected: Any, ids: tuple[int, ...]) -> bool:
    if answer is None or expected is None:
        return False
    wanted = expected[list(ids)] if ids else expected
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-6)
    return answer.shape == wanted.shape and bool(
        np.all(np.abs(answer - wanted) <= TOLERANCE * scale)
    )


def check_statuses(record: Record) -> Iterator[Finding]:
    """Requests end with the documented statuses of their kind."""
    odd: Counter[str] = Counter()
    unexplained: Counter[str] = Counter()
    for key, asked, end in record.pairs:
        status = end.status.removeprefix("STREAM_")
        if status != end.status and not _stream_may_end(record, asked, end):
            odd[f"{asked.kind} {end.status}"] += 1
        elif status == end.status and not _may_end(record, asked, end):
            odd[f"{asked.kind} {asked.model} {status}: {end.words[:80]}"] += 1
        elif status == "UNAVAILABLE" and not _is_explained(record, key, asked, end):
            unexplained[f"{asked.kind} {end.words[:80]}"] += 1
    yield _none("statuses that are not documented", list(odd.elements()), odd)
    yield _none(
        "UNAVAILABLE without a documented reason", list(unexplained.elements()), unexplained
    )


def _stream_may_end(record: Record, asked: Asked, end: Outcome) -> bool:
    if end.status == "STREAM_CANCELLED":
        return end.by_client or record.is_down(asked.at, end.at)
    if end.status == "STREAM_RESOURCE_EXHAUSTED":  # no thread to read the stream
        return bool(record.during("no threads", asked.at, end.at))
    return end.status == "STREAM_UNAVAILABLE" and record.is_down(asked.at, end.at)


def _may_end(record: Record, asked: Asked, end: Outcome) -> bool:
    if end.status == "CANCELLED" and not end.by_client:
        return False
    if asked.kind == "region" and end.status in ("INVALID_ARGUMENT", "NOT_FOUND"):
        return any(asked.registered <= life.ready <= end.at for life in record.lives)
    return end.status in STATUSES[asked.kind]


def _is_explained(record: Record, key: str, asked: Asked, end: Outcome) -> bool:
    """Return True when the report gives a reason, or the server was down, or its rows were lost."""
    reasons = _UNAVAILABLE_BAD if asked.kind.startswith("bad") else _UNAVAILABLE
    rows = record.rows_of.get(key, [])
    if rows:
        return all(row.reason in reasons for row in rows)
    if record.is_down(asked.at, end.at) or asked.kind.startswith("bad"):
        return True
    unloaded = record.during("unloaded", asked.at, end.at)
    return any(fault["said"] == asked.model for fault in unloaded) or bool(
        record.during("disk full", asked.at, end.at, ROWS_LOST_S)
    )


def check_rows(record: Record) -> Iterator[Finding]:
    """The report has a row for each request, with the status that its client got."""
    lost: list[str] = []
    other: Counter[str] = Counter()
    both = 0
    for key, asked, end in record.pairs:
        rows = record.rows_of.get(key, [])
        if not rows and end.status == "OK" and not _row_may_be_lost(record, end):
            lost.append(key)
        for row in rows:
            both += 1
            status = end.status.removeprefix("STREAM_")
            gave_up = status in _CLIENT_GAVE_UP or record.is_down(asked.at, end.at)
            if row.status != status and not gave_up and status == end.status:
                other[f"{row.status} in the report, {end.status} at the client"] += 1
    twice = [key for key, rows in record.rows_of.items() if len(rows) > 1]
    uids = Counter(row.uid for row in record.rows)
    yield _none("answers without a row", lost)
    yield _none("requests with two rows", twice)
    yield _none("uids of two rows", [uid for uid, count in uids.items() if count > 1])
    differ = sum(other.values())
    most = int(OTHER_STATUS * both)
    yield Finding(
        "other status in the report", f"at most {most} of {both:,}",
        f"{differ} {dict(other) or ''}", differ <= most,
    )  # fmt: skip
    yield _rows_and_messages(record)


def _row_may_be_lost(record: Record, end: Outcome) -> bool:
    if record.during("disk full", end.at, end.at, ROWS_LOST_S):
        return True
    return any(
        life.how == "killed" and 0 <= life.ended + S - end.at <= (ROWS_LOST_S + 1) * S
        for life in record.lives
    )


def _rows_and_messages(record: Record) -> Finding:
    """Compare the last life's rows with what the transport has counted."""
    last = max(record.rows_lost)
    rows = [row for row in record.rows if row.run == last]
    told = len(rows) + sum(row.left_out for row in rows) + record.rows_lost[last]
    messages = record.end["calls"]
    if messages is None:
        return Finding("rows with lost ones, and messages", "equal", "not counted", False)
    # Streams with credentials pass the native front, which does not count their messages.
    since = record.lives[-2].ended if len(record.lives) > 1 else 0
    streamed = sum(asked.streamed and end.at >= since for _, asked, end in record.pairs)
    least, most = messages - record.end["own calls"], messages + streamed
    return Finding(
        "rows with lost ones", f"{messages:,.0f} messages, less the server's own, and those of "
        f"streams: {least:,.0f} to {most:,.0f}", f"{told:,}", least <= told <= most,
    )  # fmt: skip


def check_server(record: Record) -> Iterator[Finding]:
    """The server ends only when told to, holds nothing at the end and leaves nothing behind."""
    died = [life for life in record.lives if life.how not in ("killed", "stopped")]
    yield _none("ends that nobody asked for", died)
    codes = [life.code for life in record.lives if life.how == "stopped" and life.code != 0]
    yield _none("stops with another exit code than 0", codes)
    end = record.end
    for name in ("reserved_bytes", "waiting", "processes left", "shared memory left", "files left"):
        yield Finding(name.replace("_", " "), "0", str(end[name]), end[name] == 0)
    yield Finding(
        "lanes up at the end", str(end["lanes"]), str(end["lanes_up"]),
        end["lanes"] == end["lanes_up"],
    )  # fmt: skip
    yield Finding("journal", "replays alike", end["journal"] or "alike", end["journal"] == "")
    yield _none("tracebacks in the log", end["tracebacks"])
    unnoticed = _longest(record, lambda one: one["ready"] == 200 and not one["port_answers"])
    yield Finding(
        "ready though the port does not answer", f"at most {UNNOTICED_S:g} s",
        f"{unnoticed:.1f} s", unnoticed <= UNNOTICED_S,
    )  # fmt: skip


def check_growth(record: Record) -> Iterator[Finding]:
    """What the server holds does not grow with the number of calls."""
    for name, most in GROWTH.items():
        found = [slope for slope in _slopes(record, name) if slope is not None]
        worst = max(found, default=0.0)
        told = f"{worst:,.1f} in the worst of {len(found)} lives" if found else "too few calls"
        yield Finding(f"growth of {name} per 10,000 calls", f"at most {most:,.0f}", told,
                      worst <= most)  # fmt: skip


def _slopes(record: Record, name: str) -> Iterator[float | None]:
    lives: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for one in record.samples:
        if one.get("calls") is not None and one.get(name):
            lives[one["pid"]].append((one["calls"], one[name]))
    for points in lives.values():
        last = points[-1][0]
        if last < ENOUGH_CALLS:
            continue
        calls, values = np.array([p for p in points if p[0] >= 0.2 * last]).T
        yield float(np.polyfit(calls, values, 1)[0] * 10_000)


def _longest(record: Record, true: Callable[[dict[str, Any]], bool]) -> float:
    """Return the longest time in s of samples in a row for which something was true."""
    longest, since = 0, None
    for one in record.samples:
        since = (since or one["at"]) if true(one) else None
        longest = max(longest, one["at"] - since if since else 0)
    return longest / S


def check_waits(record: Record) -> Iterator[Finding]:
    """Nobody waits for long; judged only where the machine had nothing else to do."""
    waits = [
        (end.at - asked.at) / S
        for _, asked, end in record.pairs
        if asked.kind in ("tensors", "nodes", "region") and not record.is_down(asked.at, end.at)
    ]
    longest = max(waits, default=0.0)
    judged = bool(record.end.get("alone"))
    wanted = f"at most {LONGEST_WAIT_S:g} s" if judged else "not judged: the machine was shared"
    found = f"{longest:.1f} s"
    yield Finding("longest wait of a plain request", wanted, found,
                  longest <= LONGEST_WAIT_S or not judged)  # fmt: skip


def _none(name: str, found: list[Any], told: object = None) -> Finding:
    text = "0"
    if found:
        text = f"{len(found):,}: {dict(told) if isinstance(told, Counter) else found[:5]}"
    return Finding(name, "0", text, not found)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        yield from map(json.loads, file)


CHECKS = (
    check_outcomes, check_answers, check_statuses, check_rows, check_server, check_growth,
    check_waits,
)  # fmt: skip


def check(folder: Path) -> list[Finding]:
    """Return what must hold and what was found."""
    record = Record.read(folder)
    counts = Counter(end.status for _, _, end in record.pairs)
    findings = [Finding("requests", "some", f"{len(record.asked):,} {dict(counts)}", True)]
    for one in CHECKS:
        findings.extend(one(record))
    return findings


def main() -> None:
    findings = check(Path(sys.argv[1]))
    for finding in findings:
        mark = "ok  " if finding.holds else "FAIL"
        print(f"{mark} {finding.name}: {finding.found} (wanted: {finding.wanted})")
    sys.exit(not all(finding.holds for finding in findings))


if __name__ == "__main__":
    main()
