"""How many servers a pool is to have, by what its servers tell.

Load is counted in servers: how busy their cores are, summed over servers. A pool carries the load
for which simulation has at most 1 % late, which grows with its size, as servers behind one front
share their peaks (`MOST_LOAD`). The load is foreseen for when a server that is started now would
serve. Servers are added at once, and taken away when for ten minutes fewer would have done.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from math import log2

from serve.core.cluster.growth import Growth
from serve.wilson import wilson_interval

#: Number of servers, and the highest load of each with at most 1 % late behind a front that counts:
#: `python -m bench.cluster.routing`.
MOST_LOAD = ((1, 0.58), (16, 0.97))
#: Part of that load which is used: simulated servers lose no time to anything but runs.
_HEADROOM = 0.8
#: Load is that of so long, and its trend is that since as long before.
WINDOW_NS = 20_000_000_000
_SECOND_NS = 1_000_000_000
#: For so long fewer servers have to be enough before any is taken away.
DOWN_AFTER_NS = 600_000_000_000
#: Share of answers that come late for want of servers which is too much.
_MOST_LATE = 0.01
_Z = 3.0


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What a server has done in all."""

    #: Requests that ended.
    ended: int = 0
    #: Those of them that were late, or refused, because there was too much to do.
    crowded: int = 0
    #: Time of runs, summed over its cores.
    run_ns: int = 0
    #: Runs that execute at once.
    cores: int = 1


@dataclass(slots=True)
class _Second:
    """What all servers told in a second."""

    at_ns: int
    #: Busy time, each server's as a share of its cores.
    busy_ns: float = 0.0
    ended: int = 0
    crowded: int = 0


class Scaler:
    """Decides how many servers a pool is to have. Pure."""

    __slots__ = (
        "_began_ns", "_changed_ns", "_count", "_growth", "_least", "_most", "_needs", "_start_ns",
        "_told",
    )  # fmt: skip

    def __init__(self, least: int, most: int, count: int, *, start_ns: int, now_ns: int) -> None:
        """Stay between `least` and `most`; begin with `count`.

        A server serves `start_ns` after it is wanted.
        """
        if not 1 <= least <= most:
            raise ValueError(f"1 <= least {least} <= most {most} servers")
        self._least, self._most, self._start_ns = least, most, start_ns
        self._count = min(max(count, least), most)
        self._began_ns = self._changed_ns = now_ns
        self._growth = Growth()
        self._told: deque[_Second] = deque()
        #: When how many were needed, the later ones fewer.
        self._needs: deque[tuple[int, int]] = deque()

    @property
    def count(self) -> int:
        """How many servers are wanted."""
        return self._count

    def told(self, server: str, counts: ServerCounts, now_ns: int) -> None:
        """Take in what a server has done; `server` names a start of it."""
        grown = self._growth.of(server, (counts.ended, counts.crowded, counts.run_ns))
        ended, crowded, run_ns = grown
        if not self._told or now_ns - self._told[-1].at_ns >= _SECOND_NS:
            self._told.append(_Second(now_ns))
        second = self._told[-1]
        second.busy_ns += run_ns / counts.cores
        second.ended += ended
        second.crowded += crowded

    def decide(self, ready: int, now_ns: int) -> int:
        """Return how many servers are wanted, where so many are ready."""
        while self._told and self._told[0].at_ns <= now_ns - 2 * WINDOW_NS:
            self._told.popleft()
        need = servers_for(self._foreseen(now_ns), self._most)
        if ready >= self._count and self._is_crowded(now_ns):
            need = max(need, self._count + 1)
        need = min(max(need, self._least), self._most)
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now_ns, need))
        while self._needs[0][0] <= now_ns - DOWN_AFTER_NS:
            self._needs.popleft()
        wanted = max(need, self._count)
        if now_ns - self._began_ns >= DOWN_AFTER_NS:
            wanted = self._needs[0][1]
        if wanted != self._count:
            self._count, self._changed_ns = wanted, now_ns
        return wanted

    def _foreseen(self, now_ns: int) -> float:
        """Return the load, in servers, when a server that starts now would serve.

        It grows as it has grown since the window before, at most twofold.
        """
        if now_ns - self._began_ns < WINDOW_NS:
            return 0.0  # not a whole window is known
        since_ns = now_ns - WINDOW_NS
        load = sum(told.busy_ns for told in self._told if told.at_ns > since_ns) / WINDOW_NS
        if now_ns - self._began_ns < 2 * WINDOW_NS:
            return load
        before = sum(told.busy_ns for told in self._told if told.at_ns <= since_ns) / WINDOW_NS
        growth = max(0.0, load - before) * self._start_ns / WINDOW_NS
        return min(load + growth, 2 * load)

    def _is_crowded(self, now_ns: int) -> bool:
        """Return True when clearly too many were late for want of servers since the last change."""
        since_ns = max(now_ns - WINDOW_NS, self._changed_ns + self._start_ns)
        told = [told for told in self._told if told.at_ns > since_ns]
        ended, crowded = sum(one.ended for one in told), sum(one.crowded for one in told)
        low, _ = wilson_interval(crowded, ended, _Z)
        return low > _MOST_LATE


def most_load(servers: int) -> float:
    """Return the highest load of each of so many servers with at most 1 % late."""
    sizes = [size for size, _ in MOST_LOAD]
    after = bisect_left(sizes, servers)
    if after == len(sizes):
        return MOST_LOAD[-1][1]
    size, load = MOST_LOAD[after]
    if size == servers:
        return load
    size_before, load_before = MOST_LOAD[after - 1]
    part = (log2(servers) - log2(size_before)) / (log2(size) - log2(size_before))
    return load_before + part * (load - load_before)


def servers_for(load: float, most: int) -> int:
    """Return the fewest servers that carry a load, at most `most`."""
    return next((n for n in range(1, most) if load <= n * most_load(n) * _HEADROOM), most)
