"""The host's own work, where it takes processor time from the lanes: server and client processes.

Each does one piece of work after the other, as the threads of one Python process do. What of a core
it gets meanwhile depends on what else wants one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serve.core.types import ZERO_NS, Nanos

#: How much a lane counts beside a process of the host when there are more of them than cores: what
#: their niceness makes of lanes on Linux.
LANE_WEIGHT = 1 / 3


@dataclass(frozen=True, slots=True)
class HostModel:
    """Cores shared by lanes, server and client, and processor time for each request on them.

    Preparing and answering are the request's own, see ``Offered``; this is what there is besides.
    """

    cores: int
    #: The client's, until a request is sent; and when its answer is there.
    send_ns: Nanos = ZERO_NS
    read_ns: Nanos = ZERO_NS
    #: The server's, until a request counts as arrived; and when its answer is out.
    receive_ns: Nanos = ZERO_NS
    finish_ns: Nanos = ZERO_NS

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ValueError(f"cores {self.cores} must be at least 1")
        if min(self.send_ns, self.read_ns, self.receive_ns, self.finish_ns) < 0:
            raise ValueError(f"processor time must be at least 0 ns, got {self}")

    def shares(self, processes: int, executing: int) -> tuple[float, float]:
        """What of a core each busy process gets and each of `executing` runs.

        More runs than cores share theirs by the slowdown of the device.
        """
        runs = min(executing, self.cores)
        if processes + runs <= self.cores:
            return 1.0, 1.0
        of_process = min(1.0, self.cores / (processes + LANE_WEIGHT * runs))
        return of_process, (self.cores - processes * of_process) / runs if runs else 1.0


@dataclass(slots=True)
class _Piece:
    left_ns: float
    then: Callable[[], None]


class Process:
    """One process of the host."""

    __slots__ = ("_at_ns", "_pieces", "_share")

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque()
        self._at_ns = 0
        self._share = 1.0

    @property
    def busy(self) -> bool:
        """Whether it has anything to do."""
        return bool(self._pieces)

    def do(self, work_ns: int, then: Callable[[], None], now_ns: int) -> None:
        """Work for `work_ns` when everything before is done, `then` do that."""
        self.gets(self._share, now_ns)
        self._pieces.append(_Piece(work_ns, then))

    def gets(self, share: float, now_ns: int) -> None:
        """From now on it gets so much of a core."""
        if self._pieces:
            self._pieces[0].left_ns -= (now_ns - self._at_ns) * self._share
        self._at_ns = now_ns
        self._share = share

    def next_end(self) -> int | None:
        """When the piece it works on is done if its share stays; None: it has none."""
        if not self._pieces:
            return None
        return self._at_ns + max(0, round(self._pieces[0].left_ns / self._share))

    def end(self, now_ns: int) -> Callable[[], None]:
        """The piece it works on is done; what was to be done then."""
        self.gets(self._share, now_ns)
        return self._pieces.popleft().then
