"""How long the server waits for a core on which a lane computes, by the lane's niceness.

    python -m bench.host.wakeups [--quick] [--messages 3000] [--out bench/results/wakeups.json]

Three processes: on the first core one computes without end, as a lane does, and one waits for
messages, as the server does; another core sends messages at random moments, 600 a second, and each
is half a millisecond of work for the one that waits: a third of a core, as a server under load has.
Waited is from the sending until the message is read, behind its own work for the message before
as well; with nothing else on its core that is all of it (`no lane`).

The kernel gives a core in turns by what each has had. One that wakes soon after its own turn has
had its part and waits, until a tick of the kernel finds that the other has had its, too. The nicer
the lane, the sooner that is.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kit.result import write_result

#: None: the core is the server's alone.
NICENESS: tuple[int | None, ...] = (None, 0, 5, 10, 15, 19)
ROUNDS = 3
RATE_HZ = 600
WORK_NS = 500_000
PERCENT = (50, 90, 95, 99)
_context = get_context("fork")


def compute(core: int, niceness: int) -> None:
    """As a lane."""
    os.sched_setaffinity(0, {core})
    os.nice(niceness)
    while True:
        pass


def send(core: int, pipe: "Connection[int, int]", messages: int, seed: int) -> None:
    """The time, again and again."""
    os.sched_setaffinity(0, {core})
    rng = random.Random(seed)
    for _ in range(messages):
        time.sleep(rng.expovariate(RATE_HZ))
        pipe.send(time.monotonic_ns())


def receive(core: int, pipe: "Connection[int, int]", messages: int) -> list[int]:
    """Waited for each message, ns; called in a process of its own."""
    os.sched_setaffinity(0, {core})
    waited_ns = []
    for _ in range(messages):
        sent_ns = pipe.recv()
        waited_ns.append(time.monotonic_ns() - sent_ns)
        until_ns = time.thread_time_ns() + WORK_NS
        while time.thread_time_ns() < until_ns:
            pass
    return waited_ns


def beside(niceness: int | None, messages: int, seed: int) -> list[int]:
    """Waited for each message, ns, beside one that computes."""
    first, *others = sorted(os.sched_getaffinity(0))
    ours, theirs = _context.Pipe(duplex=False)
    started = [_started(send, (others or [first])[0], theirs, messages, seed)]
    if niceness is not None:
        started.append(_started(compute, first, niceness))
    try:
        with _context.Pool(1) as pool:
            return pool.apply(receive, (first, ours, messages))
    finally:
        for process in started:
            process.kill()
            process.join()


def _started(target: Callable[..., None], *arguments: object) -> Any:
    process = _context.Process(target=target, args=arguments)
    process.start()
    return process


def row(niceness: int | None, rounds: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Quantiles of the rounds, in the middle and at both ends."""
    found: dict[str, Any] = {"niceness": niceness}
    for percent in PERCENT:
        values = [sorted(one)[len(one) * percent // 100] / 1e3 for one in rounds]
        found[f"p{percent}_us"] = statistics.median(values)
        found[f"p{percent}_us_range"] = [min(values), max(values)]
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("lane's niceness", *(f"{percent} %" for percent in PERCENT),
                  title="Waited for a core, µs (range of rounds)")  # fmt: skip
    for one in rows:
        cells = (
            "{:.0f} ({:.0f} to {:.0f})".format(one[f"p{q}_us"], *one[f"p{q}_us_range"])
            for q in PERCENT
        )
        table.add_row("no lane" if one["niceness"] is None else str(one["niceness"]), *cells)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="300 messages, not kept")
    parser.add_argument("--messages", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/wakeups.json"))
    options = parser.parse_args()
    messages = 300 if options.quick else options.messages
    waited: dict[int | None, list[list[int]]] = {niceness: [] for niceness in NICENESS}
    for seed in range(ROUNDS):
        for niceness in NICENESS:
            waited[niceness].append(beside(niceness, messages, seed))
    rows = [row(niceness, rounds) for niceness, rounds in waited.items()]
    show(rows)
    if options.quick:
        return
    content = {"messages": messages, "rounds": ROUNDS, "rows": rows}
    write_result(options.out, content)
    Console().print(str(options.out))


if __name__ == "__main__":
    main()
