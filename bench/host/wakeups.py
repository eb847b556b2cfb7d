"""Measure how long the server waits for a core on which a lane computes, by the lane's niceness.

    python -m bench.host.wakeups [--quick] [--messages 3000]

On the first core one process computes without end, as a lane does, and one waits for messages, as
the server does. Another core sends messages at random moments, 600 a second; each is half a
millisecond of work, so the receiver needs a third of a core. The wait counts from the sending until
the message is read, so it includes the receiver's own work for the message before.
"""

import argparse
import os
import random
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from bench.kit.measure import in_turns, percentiles, spread
from bench.kit.script import Script, Table

#: None: no lane computes there.
NICENESS: tuple[int | None, ...] = (None, 0, 5, 10, 15, 19)
RATE_HZ, WORK_NS, PERCENTS = 600, 500_000, (50, 90, 95, 99)
SCRIPT = Script(
    "wakeups",
    full={"messages": 3000, "rounds": 3},
    quick={"messages": 30, "rounds": 1},
    tables=[
        Table("Wait for a core, µs (median, least, most of the rounds)", "rows", {
            "lane's niceness": "{niceness}", **{f"{q} %": f"{{p{q}_us}}" for q in PERCENTS},
        })
    ],
)  # fmt: skip
_context = get_context("fork")


def compute(core: int, niceness: int) -> None:
    """Keep the core busy, as a lane does."""
    os.sched_setaffinity(0, {core})
    os.nice(niceness)
    while True:
        pass


def send(core: int, pipe: "Connection[int, int]", messages: int) -> None:
    """Send the time at random moments."""
    os.sched_setaffinity(0, {core})
    rng = random.Random(0)
    for _ in range(messages):
        time.sleep(rng.expovariate(RATE_HZ))
        pipe.send(time.monotonic_ns())


def receive(core: int, pipe: "Connection[int, int]", messages: int) -> list[float]:
    """Return the wait for each message in µs, working half a millisecond for each."""
    os.sched_setaffinity(0, {core})
    waited_us = []
    for _ in range(messages):
        sent_ns = pipe.recv()
        waited_us.append((time.monotonic_ns() - sent_ns) / 1e3)
        until_ns = time.thread_time_ns() + WORK_NS
        while time.thread_time_ns() < until_ns:
            pass
    return waited_us


def waits(niceness: int | None, messages: int) -> dict[str, float]:
    """Return percentiles of the wait in µs, beside a lane of that niceness."""
    first, *others = sorted(os.sched_getaffinity(0))
    ours, theirs = _context.Pipe(duplex=False)
    started = [_started(send, (others or [first])[0], theirs, messages)]
    if niceness is not None:
        started.append(_started(compute, first, niceness))
    try:
        with _context.Pool(1) as pool:
            return percentiles(pool.apply(receive, (first, ours, messages)), PERCENTS)
    finally:
        for process in started:
            process.kill()
            process.join()


def _started(target: Callable[..., None], *arguments: object) -> Any:
    process = _context.Process(target=target, args=arguments)
    process.start()
    return process


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each niceness: median, least and most of the rounds."""
    ways = {str(niceness): partial(waits, niceness, options.messages) for niceness in NICENESS}
    found = in_turns(ways, options.rounds, warm_up=0)
    rows = [
        {"niceness": niceness}
        | {f"p{q}_us": spread([one[f"p{q}"] for one in found[str(niceness)]], 1) for q in PERCENTS}
        for niceness in NICENESS
    ]
    return {"messages": options.messages, "rounds": options.rounds, "rows": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
