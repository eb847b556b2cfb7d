"""Runs that other programs did not disturb: a disturbed run is repeated, whatever it showed.

The kernel's accounts show other programs on this machine. They do not show other virtual machines
on the same hardware, which slow everything down for seconds. So on each core a thread times the
same small piece of work twenty times a second.
"""

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.kit.open_loop import LoadProcess, LoadRun
from bench.kit.processes import descendants
from bench.kit.servers import ServerProcess

#: Highest share of the cores' time that other programs may take.
OTHERS_LIMIT = 0.05
#: Highest ratio of the cores' time for the piece of work to their best.
SLOWER_LIMIT = 1.1
TRIES = 4
#: A quarter of a millisecond, after as much with cold caches: a hundredth of a core.
_STEPS = 10_000
_EVERY_S = 0.05
_TICKS_HZ = os.sysconf("SC_CLK_TCK")


class Undisturbed:
    """Sends traces until nobody disturbed them."""

    def __init__(
        self, client: LoadProcess, tries: int = TRIES, slower_limit: float = SLOWER_LIMIT
    ) -> None:
        self._client = client
        self._slower_limit = slower_limit
        # Quick runs run beside others.
        self._tries = 1 if ServerProcess.quick else tries
        self._cores = sorted(os.sched_getaffinity(0))
        #: Best time of the piece of work: the least median of the runs so far.
        self._best_ns = statistics.median(_piece_ns() for _ in range(400))

    def warm_up(self, trace: Path, address: str) -> LoadRun:
        """Send the trace once."""
        return self._client.run(trace, address)

    def run(self, trace: Path, address: str, pid: int) -> tuple[LoadRun, dict[str, float]]:
        """Send the trace to the server that is process `pid` until nobody disturbed it.

        The last try counts in any case. Returns the run, shares of all cores' time (`cores_…`;
        lanes are the processes below the server), the ratio of the cores' time to their best
        (`slower`), and the number of discarded runs (`disturbed`).
        """
        for disturbed in range(self._tries):  # noqa: B007  returned below
            before = _cpu_s(pid)
            with self._paced() as pieces_ns:
                run = self._client.run(trace, address)
            used_s = {who: s - before[who] for who, s in _cpu_s(pid).items()}
            shares = self._shares(run, used_s)
            piece_ns = statistics.median(pieces_ns or [self._best_ns])
            self._best_ns = min(self._best_ns, piece_ns)
            slower = piece_ns / self._best_ns
            if shares["cores_others"] <= OTHERS_LIMIT and slower <= self._slower_limit:
                break
        return run, {**shares, "slower": slower, "disturbed": disturbed}

    @contextmanager
    def _paced(self) -> Iterator[list[int]]:
        """Yield a list that gets the processor time of the piece of work, in ns, while open."""
        pieces_ns: list[int] = []
        over = threading.Event()

        def measure(core: int) -> None:
            os.sched_setaffinity(0, {core})
            while not over.wait(_EVERY_S):
                pieces_ns.append(_piece_ns())

        threads = [threading.Thread(target=measure, args=(core,)) for core in self._cores]
        for thread in threads:
            thread.start()
        try:
            yield pieces_ns
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _shares(self, run: LoadRun, used_s: dict[str, float]) -> dict[str, float]:
        """Return the share of all cores' time by process."""
        ours_s = {"lanes": used_s["lanes"], "server": used_s["server"], "client": run.cpu_s}
        others_s = used_s["machine"] - sum(ours_s.values()) - used_s["bench"]
        whole_s = run.elapsed_s * len(self._cores)
        return {
            f"cores_{who}": max(0.0, s) / whole_s
            for who, s in {**ours_s, "others": others_s}.items()
        }


def _piece_ns() -> int:
    """Return the processor time of the piece of work, without waits for a core."""
    _count(_STEPS)
    started_ns = time.thread_time_ns()
    _count(_STEPS)
    return time.thread_time_ns() - started_ns


def _count(steps: int) -> None:
    total = 0
    for step in range(steps):
        total += step


def _cpu_s(pid: int) -> dict[str, float]:
    """Return the processor time so far."""
    main_s = _process_s(pid)
    return {
        "server": main_s,
        "lanes": sum(map(_process_s, descendants(pid))),
        "machine": _machine_busy_s(),
        "bench": time.process_time(),
    }


def _machine_busy_s() -> float:
    """Return the processor time so far of everything on this machine."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return (sum(map(int, fields)) - int(fields[3]) - int(fields[4])) / _TICKS_HZ


def _process_s(pid: int) -> float:
    """Return the processor time so far of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_HZ
