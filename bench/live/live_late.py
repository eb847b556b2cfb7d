"""Where the time of requests went in a live run, and what made the late ones late."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.kit.live_setup import Traces
from bench.kit.open_loop import LoadRun
from serve.workload import Trace

STAGES = ("transport", "queue", "prepare", "suspended", "run", "hand-over", "answer")


def stages(row: Mapping[str, Any], latency_ns: int) -> dict[str, int]:
    """Where one request's time went, as the client counts it."""
    inside = row["queue_ns"] + row["prepare_exposed_ns"] + row["suspended_ns"] + row["run_ns"]
    return {
        "transport": latency_ns - row["latency_ns"],
        "queue": row["queue_ns"],
        "prepare": row["prepare_exposed_ns"],
        "suspended": row["suspended_ns"],
        "run": row["run_ns"],
        "hand-over": row["latency_ns"] - inside - row["answer_ns"],
        "answer": row["answer_ns"],
    }


def late_ones(
    trace: Trace, run: LoadRun, kept: Mapping[str, Mapping[str, Any]], traces: Traces
) -> Iterator[dict[str, Any]]:
    """Each request the server answered late, in order of arrival.

    Stages beside what is known of the request alone: its run, and all others together.
    """
    before_ns = 0
    for number, (item, seen) in enumerate(zip(trace.items, run.seen, strict=True)):
        gap_ns, before_ns = item.offset_ns - before_ns, item.offset_ns
        if seen.error or item.qos_target_us is None:
            continue
        row = kept[seen.request_uid]
        if row["latency_ns"] <= item.qos_target_us * 1000:
            continue
        solo = traces.solo_of(item)
        taken = stages(row, seen.latency_ns)
        yield {
            "number": number,
            "uid": seen.request_uid,
            "model": item.model,
            "num_nodes": item.num_nodes,
            "num_edges": item.num_edges,
            "sent_at_ms": item.offset_ns / 1e6,
            "after_previous_ms": gap_ns / 1e6,
            "send_lag_ms": seen.lag_ns / 1e6,
            "target_ms": item.qos_target_us / 1e3,
            "latency_ms": row["latency_ns"] / 1e6,
            "run_solo_ms": solo.run_ns / 1e6,
            "host_solo_ms": (solo.solo_ns - solo.run_ns) / 1e6,
            "run_estimate_ms": row["run_estimate_ns"] / 1e6,
            "stages_ms": {stage: taken_ns / 1e6 for stage, taken_ns in taken.items()},
            **{name: row[name] for name in ("lane", "co_runners", "merged", "cause")},
        }
