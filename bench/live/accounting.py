"""Where time went in two runs of one trace, request by request."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from bench.kit.measure import percentiles
from bench.kit.open_loop import LoadRun
from bench.live.live import handover_ns
from serve.workload import Trace

#: What a request's time in the server is made of. `start`: from the launch until the lane began;
#: `return`: from the lane's end until the server heard of it.
PARTS = ("waiting", "suspended", "start", "run", "return", "answer")


@dataclass(frozen=True, slots=True)
class Account:
    """One request in one run of the trace."""

    late: bool
    #: By part.
    taken_ns: Mapping[str, int]
    run_over_estimate: float


def accounts(
    trace: Trace, run: LoadRun, kept: Mapping[str, dict[str, Any]]
) -> list[Account | None]:
    """Return what became of each request, in the trace's order; None for one without an answer."""
    found: list[Account | None] = []
    for item, seen in zip(trace.items, run.seen, strict=True):
        if seen.error:
            found.append(None)
            continue
        assert item.qos_target_us is not None
        row = kept[seen.request_uid]
        late = row["latency_ns"] > item.qos_target_us * 1000
        found.append(Account(late, parts_ns(row), row["run_ns"] / row["run_estimate_ns"]))
    return found


def parts_ns(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the time of each part; together they are the latency in the server."""
    return {
        "waiting": row["queue_ns"] + row["prepare_exposed_ns"],
        "suspended": row["suspended_ns"],
        "start": row["start_ns"],
        "run": row["run_ns"],
        "return": handover_ns(dict(row)) - row["start_ns"],
        "answer": row["answer_ns"],
    }


def compared(
    pairs: Sequence[tuple[Account | None, Account | None]],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each part, from each request without and with what is tried.

    `grew_most` is the share in which that part grew the most, of the requests that were late only
    with it; `shrank_most` that of the requests late only without it, by what shrank the most.
    """
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    grew = Counter(_grown(one, other) for one, other in both if other.late and not one.late)
    shrank = Counter(_grown(other, one) for one, other in both if one.late and not other.late)
    for part in PARTS:
        row: dict[str, Any] = {"part": part}
        for number, name in enumerate(("without", "with")):
            taken_ms = [pair[number].taken_ns[part] / 1e6 for pair in both] or [0.0]
            row[f"{name}_ms"] = fmean(taken_ms)
            row[f"{name}_p99_ms"] = percentiles(taken_ms, (99,), 6)["p99"]
        row["grew_most"] = grew[part] / max(1, grew.total())
        row["shrank_most"] = shrank[part] / max(1, shrank.total())
        row |= {"late_only_with": grew.total(), "late_only_without": shrank.total()}
        yield row


def run_over_estimate(found: Sequence[Account | None]) -> float:
    """Return the median of run ÷ estimate; 0 where nothing was answered."""
    return median([one.run_over_estimate for one in found if one is not None] or [0.0])


def _grown(one: Account, other: Account) -> str:
    """Return the part that takes the most more in `other`."""
    return max(PARTS, key=lambda part: other.taken_ns[part] - one.taken_ns[part])
