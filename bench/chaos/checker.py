"""Checks the record of a chaos run; shares no code with the server, nor with what wrote the record.

    python -m bench.chaos.checker FOLDER

Prints what must hold and what was found, writes it into `verdict.json`, and exits with 1 when
something does not hold.
"""

import json
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.chaos.growth import ENOUGH_LANES, GROWTH, growths
from bench.chaos.record import Asked, Outcome, Record, Row, S

#: Largest difference of an answer from plain PyG's, as a share of the output's scale.
TOLERANCE = 1e-4
#: A killed process loses the rows of its last half second; and some more on a busy machine.
ROWS_LOST_S, ROWS_LOST_BUSY_S = 0.5, 2.0
#: Longest time between a client's limit and an answer that it did not take; and on a busy machine.
RACE_S, RACE_BUSY_S = 0.05, 1.0
#: Least share of plain requests that are answered, or refused as documented, and the least number
#: of them to judge it by.
PLAIN_SHARE, ENOUGH_PLAIN = 0.999, 1000
#: Least share of seconds in which something was done to the server.
BUSY_SHARE = 0.9
#: Longest time that `ready` may say 200 though the gRPC port does not answer: the server's watchdog
#: calls its own port so often.
UNNOTICED_S = 5.0
#: Share of requests in time beside a flood, as a part of that without, and the least number of
#: requests on either side to judge it by.
BESIDE_FLOOD, ENOUGH_BESIDE = 0.9, 400
#: Time in which lanes are up again, and time of a stop beyond `server.drain_timeout_s`.
LANES_UP_S, STOP_S = 15.0, 5.0
#: Share of requests that may have another status in the report than at the client.
OTHER_STATUS = 1e-4
LONGEST_WAIT_S = 10.0
#: Faults during which no lane can be started: what waits for a lane then waits for their end, too.
HOLD_LANES = ("no threads", "no descriptors", "fork server frozen", "server frozen")

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
    "expiring": {"OK"} | _REFUSED,
}
#: Longest time that a client waits where the record tells no limit.
PATIENCE_S = 120.0
#: A server looks for expired credentials twice a second; and more for a busy machine.
EXPIRY_S = 3.0
#: The tenant that floods now and then.
FLOODS = 0
#: What the server held at the end, and what it left.
NOTHING_AT_THE_END = (
    "reserved_bytes", "staged_bytes", "waiting", "inside", "regions",
    "copies of models that are not served", "processes left", "shared memory left", "files left",
)  # fmt: skip
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
    #: What was found as a number, and whether numbers of several runs are added up.
    figure: float = 0.0
    adds: bool = True
    #: False where nothing can be said, as too little was seen or the machine was shared.
    judged: bool = True


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
    yield Finding("answers compared", "all", f"{compared:,}", compared > 0, compared)
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
    if end.status == "DEADLINE_EXCEEDED" and _ran_out_while_still(record, asked, end):
        return True
    if asked.kind == "expiring" and end.status == "UNAUTHENTICATED":
        return bool(record.during("clock forwards", asked.at, end.at, EXPIRY_S))
    if asked.kind == "region" and end.status in ("INVALID_ARGUMENT", "NOT_FOUND"):
        # The next life answers before anybody has seen that it is ready.
        return any(asked.registered <= life.ended <= end.at for life in record.lives)
    return end.status in STATUSES[asked.kind]


def _ran_out_while_still(record: Record, asked: Asked, end: Outcome) -> bool:
    """Return True when a client's limit passed because nothing ran for a while."""
    limit_s, waited_s = asked.limit_s or PATIENCE_S, (end.at - asked.at) / S
    return waited_s - record.stood_still_s(asked.at, end.at) < limit_s <= waited_s


def _is_explained(record: Record, key: str, asked: Asked, end: Outcome) -> bool:
    """Return True when the report gives a reason, or the server was down, or its rows were lost."""
    if record.is_down(asked.at, end.at):
        return True
    reasons = _UNAVAILABLE_BAD if asked.kind.startswith("bad") else _UNAVAILABLE
    rows = record.rows_of.get(key, [])
    if rows:
        return all(row.reason in reasons for row in rows)
    if asked.kind.startswith("bad"):
        return True
    unloaded = record.during("unloaded", asked.at, end.at)
    return any(fault["said"] == asked.model for fault in unloaded) or _is_full(
        record, asked.at, end.at
    )


def _is_full(record: Record, begin: int, end: int) -> bool:
    """Return True when rows could not be written at some time from `begin` to `end`."""
    full = ("disk full", "files limited")
    return any(record.during(name, begin, end, ROWS_LOST_BUSY_S) for name in full)


def check_plain(record: Record) -> Iterator[Finding]:
    """Plain requests of models that behave are answered, or refused as documented."""
    ends = Counter(
        _may_end(record, asked, end)
        for _, asked, end in record.pairs
        if asked.kind in ("tensors", "nodes", "region")
        and not end.status.startswith("STREAM_")
        and not record.is_down(asked.at, end.at)
    )
    share = ends[True] / max(ends.total(), 1)
    judged = ends.total() >= ENOUGH_PLAIN
    found = f"{share:.4%} of {ends.total():,}"
    yield Finding("plain requests answered, or refused as documented", f"at least {PLAIN_SHARE}",
                  found, share >= PLAIN_SHARE or not judged, share, adds=False,
                  judged=judged)  # fmt: skip


def check_rows(record: Record) -> Iterator[Finding]:
    """The report has a row for each request, with the status that its client got."""
    lost: list[str] = []
    other: Counter[str] = Counter()
    both, oldest = 0, 0.0
    for key, asked, end in record.pairs:
        rows = record.rows_of.get(key, [])
        if not rows and end.status == "OK" and not _is_full(record, end.at, end.at):
            age_s = _age_at_kill(record, end)
            if age_s is None or age_s > ROWS_LOST_BUSY_S:
                lost.append(key)
            else:
                oldest = max(oldest, age_s)
        for row in rows:
            both += 1
            if row.status != end.status and not _is_race(record, asked, end, row):
                other[f"{row.status} in the report, {end.status} at the client"] += 1
    twice = [key for key, rows in record.rows_of.items() if len(rows) > 1]
    uids = Counter(row.uid for row in record.rows)
    yield _none("answers without a row", lost)
    judged = bool(record.end.get("alone"))
    yield _at_most("age of the oldest row lost at a kill, s", ROWS_LOST_S, oldest, judged)
    yield _none("requests with two rows", twice)
    yield _none("uids of two rows", [uid for uid, count in uids.items() if count > 1])
    differ = sum(other.values())
    most = int(OTHER_STATUS * both)
    yield Finding(
        "other status in the report than at the client", f"at most {OTHER_STATUS:.2%}",
        f"{differ} of {both:,} {dict(other) or ''}", differ <= most, differ,
    )  # fmt: skip
    yield _rows_and_messages(record)


def _age_at_kill(record: Record, end: Outcome) -> float | None:
    """Return how long before a kill of the main process an answer came, in s.

    None where none came after it. An answer may reach its client a little after that, too.
    """
    ages = [
        (life.ended - end.at) / S
        for life in record.lives
        if life.how == "killed" and life.ended + S >= end.at
    ]
    return max(min(ages), 0.0) if ages else None


def _is_race(record: Record, asked: Asked, end: Outcome, row: Row) -> bool:
    """Return True when client and report may say different things about how a request ended.

    Its stream broke, the server was down, or the client's limit passed as the answer left.
    """
    if end.status.startswith("STREAM_") or record.is_down(asked.at, end.at):
        return True
    if end.status not in _CLIENT_GAVE_UP:
        return False
    if row.status in _CLIENT_GAVE_UP or not asked.limit_s:
        return row.status in _CLIENT_GAVE_UP
    most_s = RACE_S if record.end.get("alone") else RACE_BUSY_S
    return abs(row.latency_ns / S - asked.limit_s) <= most_s


def _rows_and_messages(record: Record) -> Finding:
    """Compare the last life's rows with what the transport has counted."""
    last = max(record.rows_lost)
    rows = [row for row in record.rows if row.run == last]
    told = len(rows) + sum(row.left_out for row in rows) + record.rows_lost[last]
    messages = record.end["calls"]
    name, wanted = "messages without a row, and rows without a message", "0"
    if messages is None:
        return Finding(name, wanted, "not counted", False, told)
    wrong = abs(told - (messages - record.end["own calls"]))
    found = f"{told:,}; {messages:,.0f} messages, {record.end['own calls']:,.0f} of them its own"
    return Finding(name, wanted, found, not wrong, wrong)


def check_server(record: Record) -> Iterator[Finding]:
    """The server ends only when told to, holds nothing at the end and leaves nothing behind."""
    died = [life for life in record.lives if life.how not in ("killed", "stopped")]
    yield _none("ends that nobody asked for", died)
    codes = [life.code for life in record.lives if life.how == "stopped" and life.code != 0]
    yield _none("stops with another exit code than 0", codes)
    end = record.end
    for name in NOTHING_AT_THE_END:
        yield Finding(name.replace("_", " "), "0", str(end[name]), end[name] == 0, end[name])
    down = end["lanes"] - (end["lanes_up"] or 0)
    yield Finding("lanes down at the end", "0", f"{down:g}", down == 0, down)
    journals = end["journals"]
    otherwise = [f"{name}: {said}" for name, said in journals.items() if said]
    yield Finding("journals replayed", "all", f"{len(journals)}", True, len(journals))
    yield _none("journals that replay otherwise", otherwise)._replace(judged=bool(journals))
    yield _none("tracebacks in the log", end["tracebacks"])
    yield _none("faults that saw what must not be", [
        f"{fault['name']}: {fault['said']}"
        for fault in record.faults
        if fault["said"].startswith("violated")
    ])  # fmt: skip
    yield _busy(record)
    unnoticed = _times(record, lambda one: one["ready"] == 200 and not one["port_answers"])
    longest_s = max(((end - begin) / S for begin, end in unnoticed), default=0.0)
    yield _at_most("ready though the port does not answer, s", UNNOTICED_S, longest_s)


def _busy(record: Record) -> Finding:
    """Return in how many seconds something was done to the server.

    Starts, pauses and times in which nothing ran are left out.
    """
    faults = [(one["at"] // S, one["end"] // S) for one in record.faults]
    done = {second for begin, end in faults for second in range(begin, end + 1)}
    first, last = min(done, default=0), max(done, default=0)
    pauses = [(one["at"], one["end"]) for one in (*record.pauses, *record.stills)]
    pauses += [(a.ended, b.ready) for a, b in pairwise(record.lives)]
    apart = {s for begin, end in pauses for s in range(begin // S, end // S + 1)}
    seconds = set(range(first, last + 1)) - apart
    share = len(done & seconds) / max(len(seconds), 1)
    return Finding("share of seconds in which something was done", f"at least {BUSY_SHARE}",
                   f"{share:.1%} of {len(seconds):,}", share >= BUSY_SHARE, share,
                   adds=False)  # fmt: skip


def check_growth(record: Record) -> Iterator[Finding]:
    """What the server holds does not grow with the number of calls.

    Too much is what is more than the bound and the error of the measurement. Growth that may be
    more or less, as the error is larger than what is between, is not judged.
    """
    for name, most in GROWTH.items():
        found = sorted(growths(record, name), key=lambda one: one.least)
        is_lanes = name.startswith("lane_")
        if is_lanes and len(found) < ENOUGH_LANES:
            found = []
        figure, error, told, is_told = 0.0, 0.0, "too few calls", bool(found)
        if found:
            figure, error = found[len(found) // 2 if is_lanes else -1]
            which = "the median" if is_lanes else "the worst"
            told = f"{figure:,.1f} ± {error:,.1f} in {which} of {len(found)} lives"
            is_told = not figure - error <= most < figure + error
            told += "" if is_told else ", not judged: too inexact"
        yield Finding(f"growth of {name} per 10,000 calls", f"at most {most:,.1f}", told,
                      figure <= most or not is_told, figure, adds=False,
                      judged=is_told)  # fmt: skip


def _times(record: Record, true: Callable[[dict[str, Any]], bool]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of samples in a row for which something was true."""
    for is_true, row in groupby(record.samples, true):
        if is_true:
            times = [one["at"] for one in row]
            yield times[0], times[-1]


def _without_held(record: Record, begin: int, end: int, most_s: float) -> float:
    """Return the time from `begin` to `end` in s; of more than `most_s`, what no fault held up."""
    time_s = (end - begin) / S
    return time_s if time_s <= most_s else time_s - record.within_s(HOLD_LANES, begin, end)


def check_waits(record: Record) -> Iterator[Finding]:
    """Nobody waits for long; judged, as floods are, only where nothing else ran on the machine."""
    waits = [
        _without_held(record, asked.at, end.at, LONGEST_WAIT_S)
        for _, asked, end in record.pairs
        if asked.kind in ("tensors", "nodes", "region") and not record.is_down(asked.at, end.at)
    ]
    judged = bool(record.end.get("alone"))
    yield _at_most(
        "longest wait of a plain request, s", LONGEST_WAIT_S, max(waits, default=0.0), judged
    )
    up = record.end["lanes"]
    times = _times(record, lambda one: (one.get("gnnserve_lanes_up") or 0) < up)
    down = [_without_held(record, *one, LANES_UP_S) for one in times]
    yield _at_most("longest time with a lane down, s", LANES_UP_S, max(down, default=0.0), judged)
    stops = [life.took / S for life in record.lives if life.how == "stopped"]
    limit_s = record.end["drain_s"] + STOP_S
    yield _at_most("longest stop, s", limit_s, max(stops, default=0.0), judged)


def check_floods(record: Record) -> Iterator[Finding]:
    """Tenants that send little are answered in time as often while another tenant floods."""
    begins = [turn["at"] for turn in record.turns]
    counts = {True: [0, 0], False: [0, 0]}
    for _, asked, end in record.pairs:
        at = bisect(begins, asked.at) - 1
        if asked.tenant == FLOODS or at < 0 or asked.at > record.turns[at]["end"]:
            continue
        count = counts[record.turns[at]["flood"]]
        count[0] += 1
        count[1] += end.status == "OK" and not end.late
    (floods, kept_beside), (others, kept) = counts[True], counts[False]
    beside, without = kept_beside / max(floods, 1), kept / max(others, 1)
    name = "share in time beside a flood as a part of that without"
    wanted = f"at least {BESIDE_FLOOD}"
    if min(floods, others) < ENOUGH_BESIDE:
        found = f"too few requests: {floods}, {others}"
        yield Finding(name, wanted, found, True, adds=False, judged=False)
        return
    part = beside / without if without else 1.0
    found = f"{part:.3f}: {beside:.1%} of {floods:,} beside, {without:.1%} of {others:,} without"
    judged = bool(record.end.get("alone"))
    found += "" if judged else ", not judged: the machine was shared"
    holds = part >= BESIDE_FLOOD or not judged
    yield Finding(name, wanted, found, holds, part, adds=False, judged=judged)


def _at_most(name: str, most: float, found: float, judged: bool = True) -> Finding:
    told = f"{found:.1f}" if judged else f"{found:.1f}, not judged: the machine was shared"
    holds = found <= most or not judged
    return Finding(name, f"at most {most:g}", told, holds, found, adds=False, judged=judged)


def _none(name: str, found: list[Any], told: object = None) -> Finding:
    text = "0"
    if found:
        text = f"{len(found):,}: {dict(told) if isinstance(told, Counter) else found[:5]}"
    return Finding(name, "0", text, not found, len(found))


CHECKS = (
    check_outcomes, check_answers, check_statuses, check_plain, check_rows, check_server,
    check_growth, check_waits, check_floods,
)  # fmt: skip


def check(folder: Path) -> list[Finding]:
    """Return what must hold and what was found."""
    record = Record.read(folder)
    counts = Counter(end.status for _, _, end in record.pairs)
    asked = len(record.asked)
    findings = [Finding("requests", "some", f"{asked:,} {dict(counts)}", asked > 0, asked)]
    for one in CHECKS:
        findings.extend(one(record))
    return findings


def main() -> None:
    folder = Path(sys.argv[1])
    findings = check(folder)
    told = [finding._asdict() for finding in findings]
    (folder / "verdict.json").write_text(json.dumps(told, indent=1))
    for finding in findings:
        mark = "ok  " if finding.holds else "FAIL"
        print(f"{mark} {finding.name}: {finding.found} (wanted: {finding.wanted})")
    sys.exit(not all(finding.holds for finding in findings))


if __name__ == "__main__":
    main()
