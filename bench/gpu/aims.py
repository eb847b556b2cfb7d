"""The aims of a GPU run, numbered, and a verdict line for each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Aims in the order in which they are printed. Several benches may report to one number.
AIMS = {
    1: "answers within 1e-4 of the processor's: all models, policies and disciplines",
    2: "20,000 requests without one out of memory, and device memory as at the start",
    3: "nothing is taken from the device in steady state",
    4: "PMC within 2 % of the arena's peak, paper's models and graphs",
    5: "no PMC above its reservation",
    6: "a small budget is never exceeded, and is at least 80 % full half of the time that "
    "requests wait",
    7: "no violations at the paper's high load",
    8: "p99 at least 60 % below that of fixed concurrency",
    9: "JCT at least 75 % below one at a time",
    10: "scheduler at most 100 µs of one core a request",
    11: "features gathered in place at 93 % of a copy's speed, rows of 128 B to 4 KiB",
    12: "a small request beside a full group of large ones takes at most twice as long as alone",
    13: "lanes as threads do as much as processes under MPS",
    14: "one table of slowdowns is right within a quarter for all models and sizes",
    15: "reserved multiprocessors halve the p99 of a small request beside large ones",
}


def aim_row(number: int, reached: bool, found: Any) -> dict[str, Any]:
    """Return a finding for an aim; raises KeyError for an unknown number."""
    return {"aim": number, "what": AIMS[number], "reached": bool(reached), "found": found}


def told(
    results: Mapping[str, Mapping[str, Any]], stages: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[str]:
    """Yield a line for each aim from the results by bench: PASS, MISS or not measured.

    No aim passes by a bench with a failed check, or by one that did not end well by `stages`: it
    may have measured the easy half.
    """
    rows: list[tuple[dict[str, Any], str]] = []
    for name, result in results.items():
        doubt = _doubt(name, result, (stages or {}).get(name, {}))
        rows += [(row, doubt) for row in result.get("aims", ())]
    for number, what in AIMS.items():
        of_it = [(row, doubt) for row, doubt in rows if row["aim"] == number]
        yield f"AIM {number:2} {_verdict(of_it)}: {what}"


def _doubt(name: str, result: Mapping[str, Any], stage: Mapping[str, Any]) -> str:
    failed = sum(not check["passed"] for check in result.get("checks", ()))
    if failed:
        return f"{failed} checks of {name} failed"
    state = stage.get("state", "ok")
    return "" if state == "ok" else f"{name}: {state}"


def _verdict(rows: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    if not rows:
        return "not measured"
    missed = [row for row, _ in rows if not row["reached"]]
    doubts = sorted({doubt for _, doubt in rows if doubt})
    shown = "; ".join(str(row["found"]) for row in (missed or [row for row, _ in rows])[:4])
    reached = f"{len(rows) - len(missed)} of {len(rows)}" if len(rows) > 1 else ""
    why = f" ({', '.join(doubts)})" if doubts else ""
    verdict = "MISS" if missed or doubts else "PASS"
    return f"{verdict} {reached} [{shown[:240]}]{why}".replace("  ", " ")
