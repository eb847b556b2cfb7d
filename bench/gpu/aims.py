"""The aims of a GPU run, numbered, and a verdict on each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Aim:
    """What is aimed at, and the stages that tell whether it is reached."""

    what: str
    stages: tuple[str, ...]


#: Aims in the order in which they are printed.
AIMS = {
    1: Aim(
        "answers within 1e-4 of the processor's: all models, policies and disciplines",
        ("equality", "serving_equality"),
    ),
    2: Aim(
        "20,000 requests without one out of memory, and device memory as at the start",
        ("serving_soak",),
    ),
    3: Aim("nothing is taken from the device in steady state", ("arena",)),
    4: Aim("PMC within 2 % of the arena's peak, paper's models and graphs", ("pmc",)),
    5: Aim("no PMC above its reservation", ("pmc",)),
    6: Aim(
        "a small budget is never exceeded, and is at least 80 % full half of the time that "
        "requests wait",
        ("serving_pressure",),
    ),
    7: Aim("no violations at the paper's high load", ("serving_figures",)),
    8: Aim("p99 at least 60 % below that of fixed concurrency", ("serving_figures",)),
    9: Aim("JCT at least 75 % below one at a time", ("serving_figures",)),
    10: Aim("scheduler at most 100 µs of one core a request", ("serving_figures",)),
    11: Aim(
        "features gathered in place at 93 % of a copy's speed, rows of 128 B to 4 KiB", ("gather",)
    ),
    12: Aim(
        "a small request beside a full group of large ones takes at most twice as long as alone",
        ("concurrency",),
    ),
    13: Aim("lanes as threads do as much as processes under MPS", ("concurrency",)),
    14: Aim(
        "one table of slowdowns is right within a quarter for all models and sizes",
        ("concurrency",),
    ),
    15: Aim(
        "reserved multiprocessors halve the p99 of a small request beside large ones",
        ("isolation",),
    ),
}


@dataclass(frozen=True)
class Verdict:
    """What the findings say about an aim."""

    number: int
    what: str
    #: PASS, MISS, PART where some of its stages told nothing, or "not measured".
    word: str
    #: What was found, what is missing, and what makes it doubtful.
    found: str = ""

    def __str__(self) -> str:
        found = f" {self.found}" if self.found else ""
        return f"AIM {self.number:2} {self.word}{found}: {self.what}"


def aim_row(number: int, reached: bool, found: Any) -> dict[str, Any]:
    """Return a finding for an aim; raises KeyError for an unknown number."""
    return {"aim": number, "what": AIMS[number].what, "reached": bool(reached), "found": found}


def verdicts(
    results: Mapping[str, Mapping[str, Any]], stages: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[Verdict]:
    """Yield the verdict on each aim from the results by stage.

    No aim passes by a stage with a failed check, or by one that did not end well by `stages`: it
    may have measured the easy half. Nor does one that another of its stages has yet to tell about.
    """
    stages = stages or {}
    for number, aim in AIMS.items():
        rows = {
            name: [row for row in result.get("aims", ()) if row["aim"] == number]
            for name, result in results.items()
        }
        told = {name: found for name, found in rows.items() if found}
        doubts = sorted(filter(None, (_doubt(n, results[n], stages.get(n, {})) for n in told)))
        silent = [name for name in aim.stages if name not in told]
        quick = any(stages.get(name, {}).get("quick") for name in told)
        found = [row for rows in told.values() for row in rows]
        yield Verdict(number, aim.what, *_judged(found, doubts, silent, quick=quick))


def _doubt(name: str, result: Mapping[str, Any], stage: Mapping[str, Any]) -> str:
    failed = sum(not check["passed"] for check in result.get("checks", ()))
    if failed:
        return f"{failed} checks of {name} failed"
    state = stage.get("state", "ok")
    return "" if state == "ok" else f"{name}: {state}"


def _judged(
    rows: Sequence[Mapping[str, Any]], doubts: list[str], silent: list[str], *, quick: bool
) -> tuple[str, str]:
    """Return the word of the verdict, and what was found."""
    if not rows:
        return "not measured", ""
    missed = [row for row in rows if not row["reached"]]
    word = "MISS" if missed or doubts else "PART" if silent else "PASS"
    parts = [f"{len(rows) - len(missed)} of {len(rows)}"] if len(rows) > 1 else []
    parts.append(f"[{'; '.join(_said(row['found']) for row in (missed or rows)[:4])[:240]}]")
    notes = [*doubts, *(f"{name}: nothing yet" for name in silent), *["quick run"] * quick]
    if notes:
        parts.append(f"({', '.join(notes)})")
    return word, " ".join(parts)


def _said(found: Any) -> str:
    """Return a finding as people write it."""
    if isinstance(found, Mapping):
        return ", ".join(f"{name}: {_said(value)}" for name, value in found.items())
    if isinstance(found, list | tuple):
        return " to ".join(map(_said, found)) if len(found) == 2 else ", ".join(map(_said, found))
    return f"{found:.3g}" if isinstance(found, float) else str(found)
