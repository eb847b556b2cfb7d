"""The record of a chaos run as the checker reads it; shares no code with what wrote it.

The files are those that ``history`` names, `expected.npz` and the report's database.
"""

import base64
import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

S = 1_000_000_000
#: After a restart clients try to connect again within this time.
RECONNECT_S = 3.0


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
    late: bool


class Asked(NamedTuple):
    """A request that was sent."""

    at: int
    kind: str
    model: str
    case: int
    ids: tuple[int, ...]
    version: str
    registered: int
    tenant: int
    #: Time after which its client gives it up, in s; 0: none that matters.
    limit_s: float


class Row(NamedTuple):
    """A row of the report's database."""

    run: int
    uid: str
    client_id: str
    status: str
    reason: str
    left_out: int
    latency_ns: int


class Life(NamedTuple):
    """A process of the server: when it was ready, when it was told to end or killed, and how."""

    ready: int
    ended: int
    how: str
    code: int
    #: Time from then to its end, in ns.
    took: int


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
            for line in lines_of(path):
                found._take(line)
        for path in sorted(folder.glob("answers-*.jsonl")):
            for line in lines_of(path):
                content = np.frombuffer(base64.b64decode(line["content"]), np.float32)
                found.answers[line["hash"]] = content.reshape(line["shape"])
        with closing(sqlite3.connect(f"file:{folder / 'report.db'}?mode=ro", uri=True)) as db:
            names = "run_id, request_uid, client_id, status, reason, left_out, latency_ns"
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
                line.get("tenant", 0),
                line.get("limit_s", 0.0),
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
            bool(line.get("late")),
        )
        self.ended[line["id"]].append(outcome)

    @cached_property
    def faults(self) -> list[dict[str, Any]]:
        """What was done to the server, in order."""
        return list(lines_of(self.folder / "faults.jsonl"))

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The server seen from outside, in order."""
        return list(lines_of(self.folder / "samples.jsonl"))

    @cached_property
    def turns(self) -> list[dict[str, Any]]:
        """When one tenant flooded, and when not, in order."""
        return list(lines_of(self.folder / "turns.jsonl"))

    @cached_property
    def pauses(self) -> list[dict[str, Any]]:
        """When nothing was sent and nothing done, in order."""
        return list(lines_of(self.folder / "pauses.jsonl"))

    @cached_property
    def stills(self) -> list[dict[str, Any]]:
        """When nothing of the run ran, in order."""
        return list(lines_of(self.folder / "stills.jsonl"))

    def stood_still_s(self, begin: int, end: int) -> float:
        """Return for how long of the time from `begin` to `end` nothing of the run ran, in s."""
        return _overlap_s(self.stills, begin, end)

    def within_s(self, names: Container[str], begin: int, end: int) -> float:
        """Return for how long of the time from `begin` to `end` one of the faults lasted, in s."""
        return _overlap_s((one for one in self.faults if one["name"] in names), begin, end)

    @cached_property
    def end(self) -> dict[str, Any]:
        """How it ended."""
        found: dict[str, Any] = json.loads((self.folder / "end.json").read_text())
        return found

    @cached_property
    def lives(self) -> list[Life]:
        """Processes of the server, in order."""
        return [
            Life(line["ready"], line["ended"], line["how"], line["code"], line["took"])
            for line in lines_of(self.folder / "lives.jsonl")
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


def _overlap_s(spans: Iterable[dict[str, Any]], begin: int, end: int) -> float:
    both = ((max(one["at"], begin), min(one["end"], end)) for one in spans)
    found: float = sum(max(late - early, 0) for early, late in both) / S
    return found


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; none where it was never written."""
    if not path.exists():
        return
    with path.open() as file:
        yield from map(json.loads, file)
