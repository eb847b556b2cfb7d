"""Measure what reserved multiprocessors give short runs beside long ones, and what they cost.

    python -m bench.gpu.isolation [--quick] [--dry]

- that streams of a green context run our models, with the same answers, and can be captured;
- latency of a small task on an urgent stream beside four lanes of large ones, which use the whole
  device, or stay off 8, 16 and 24 multiprocessors;
- throughput of the large ones alone, each time.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.concurrency import LIMIT_BYTES, SIZES, Work
from bench.gpu.kit import Result, Rig, graph, relative_error, run, spread
from bench.gpu.lanes import Lane
from serve.lane.cuda.streams import StreamKind

RESERVED_SMS = (0, 8, 16, 24)
CROWD = 4
LIMIT = 1e-4


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(64 << 30, dry=arguments.dry)
    quick = arguments.quick or arguments.dry
    large = Work(rig, (500, 4000) if quick else SIZES["large"])
    small = Work(rig, SIZES["small"], hidden=64, layers=3)
    (one,) = rig.lanes(1)
    small.warm([one])
    result.put("small_alone_ms", spread(one.call(small.times, one, 50)))
    rows: list[dict[str, Any]] = []
    for reserved in RESERVED_SMS:
        with result.part(f"{reserved} multiprocessors reserved"):
            crowd = [Lane(rig.queue(reserved), rig.memory()) for _ in range(CROWD)]
            if reserved:
                works(result, rig, crowd[0], reserved)
            rows.append(beside(rig, one, crowd, small, large, reserved, quick=quick))
            result.put("beside", rows)
    told = judged(rows)
    if told is not None:
        result.put("reserved_to_none", told)
        best = min(row["p99"] for row in told.values())
        result.aim(15, len(rows) == len(RESERVED_SMS) and best <= 0.5, told)


def beside(
    rig: Rig, one: Lane, crowd: list[Lane], small: Work, large: Work, reserved: int, *, quick: bool
) -> dict[str, Any]:
    """Return the latency of the small task beside the large ones, and their own throughput."""
    theirs = StreamKind.BOUNDED if reserved else StreamKind.ORDINARY
    large.warm(crowd)
    count = 20 if quick else 200
    times = small.beside(one, count, crowd, large, StreamKind.URGENT, theirs)
    each = 2 if quick else 20
    seconds = rig.time_s(partial(large.on_all, crowd, each, theirs), 3)
    return {
        "reserved_sms": reserved, "small_ms": spread(times),
        "small_p99_ms": round(float(np.percentile(times, 99)), 3),
        "large_ms_per_task": spread([1e3 * taken_s / each / CROWD for taken_s in seconds]),
    }  # fmt: skip


def works(result: Result, rig: Rig, lane: Lane, reserved: int) -> None:
    """Check that a bounded stream computes what an ordinary one does, and can be captured."""
    model, inputs = rig.model("gcn", 128, 16, 64, 3), graph(*SIZES["small"], 128)
    found = [
        lane.call(lane.run, model, inputs, LIMIT_BYTES, kind).clone()
        for kind in (StreamKind.ORDINARY, StreamKind.BOUNDED)
    ]
    error = relative_error(found[1], found[0])
    result.check(f"answers off {reserved} multiprocessors within {LIMIT}", error <= LIMIT, error)
    doubled = lane.call(captured, lane)
    result.check(f"a run off {reserved} multiprocessors is captured", doubled == 6.0, doubled)


def captured(lane: Lane) -> float:
    """Return twice the number that is put in after the capture, 3; in the lane's thread."""
    queue = lane.queue
    with queue.running(StreamKind.BOUNDED):
        place = torch.zeros(1, device=queue.device)
        queue.finish()
        run = queue.capture(lambda: (place * 2,))
        queue.fill([(torch.full((1,), 3.0), place)])
        run.launch()
        answer = queue.landing(run.outputs[0])
        queue.download([(run.outputs[0], answer)])
        run.forget()
    return float(answer)


def judged(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]] | None:
    """Return p99 of the small and time of the large tasks ÷ without; None without that."""
    if len(rows) < 2 or rows[0]["reserved_sms"]:
        return None
    none, *others = rows
    return {
        str(row["reserved_sms"]): {
            "p99": round(row["small_p99_ms"] / none["small_p99_ms"], 3),
            "large": round(
                row["large_ms_per_task"]["median"] / none["large_ms_per_task"]["median"], 3
            ),
        }
        for row in others
    }


if __name__ == "__main__":
    run("isolation", __doc__, body)
