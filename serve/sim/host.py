"""The host's own work, where it takes processor time from the lanes: server and client processes.

A lane computes on one core at a time. The server's threads, which share one interpreter lock, are
modelled as one thread on the first core; the client goes where least is going on. On a core of
theirs they come before lanes, at once and for as long as they have work: lanes are nicer, and the
pieces of work are short, so that fairness never comes to take the core from them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from serve.core.types import ZERO_NS, Nanos

#: Of the server's threads.
SERVER_CORE = 0


@dataclass(frozen=True, slots=True)
class CoreShares:
    """Shares of a core that server, client and runs get."""

    server: float
    client: float
    #: All runs on each core together.
    runs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HostModel:
    """Cores shared by lanes, server and client, and processor time for each request on them.

    Preparing and answering are the request's own, see ``Offered``; this is what there is besides.
    """

    cores: int
    #: The client's, until a request is sent; and when its answer is there.
    send_ns: Nanos = ZERO_NS
    read_ns: Nanos = ZERO_NS
    #: The server's, until a request counts as arrived; when a run has ended, until the scheduler
    #: hears of it; and when the answer is out.
    receive_ns: Nanos = ZERO_NS
    hear_ns: Nanos = ZERO_NS
    finish_ns: Nanos = ZERO_NS

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ValueError(f"cores {self.cores} must be at least 1")
        times_ns = (self.send_ns, self.read_ns, self.receive_ns, self.hear_ns, self.finish_ns)
        if min(times_ns) < 0:
            raise ValueError(f"processor time must be at least 0 ns, got {self}")

    def taking(self, share: float) -> "HostModel":
        """Return this model with all of the server's and client's work scaled."""
        names = ("send_ns", "read_ns", "receive_ns", "hear_ns", "finish_ns")
        return replace(self, **{name: Nanos(round(getattr(self, name) * share)) for name in names})

    def shares(self, server_busy: bool, client_busy: bool, runs: Sequence[int]) -> CoreShares:
        """Return who gets what share, with so many runs executing on each core."""
        left = [1.0] * self.cores
        server = client = 1.0
        if server_busy:
            left[SERVER_CORE] = 0.0
        if client_busy:
            # Where nothing has to give way for it, if there is such a core.
            core = max(range(self.cores), key=lambda core: (left[core], -runs[core], core))
            if left[core] == 0.0:
                server = client = 0.5
            left[core] = 0.0
        return CoreShares(server, client, tuple(left))


class _Piece:
    __slots__ = ("left_ns", "then")

    def __init__(self, left_ns: float, then: Callable[[], None]) -> None:
        self.left_ns = left_ns
        self.then = then


class Process:
    """Process of the host whose threads take turns by the fraction of a millisecond.

    So each of its pieces of work advances alike.
    """

    __slots__ = ("_at_ns", "_pieces", "_share")

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._at_ns = 0
        self._share = 1.0

    @property
    def busy(self) -> bool:
        """True while it has work."""
        return bool(self._pieces)

    def do(self, work_ns: int, then: Callable[[], None], now_ns: int) -> None:
        """Do `work_ns` of work from now on, beside what there is, then call `then`."""
        self.gets(self._share, now_ns)
        self._pieces.append(_Piece(work_ns, then))

    def gets(self, share: float, now_ns: int) -> None:
        """Set the share of a core that it gets from now on."""
        if self._pieces:
            done_ns = (now_ns - self._at_ns) * self._share / len(self._pieces)
            for piece in self._pieces:
                piece.left_ns -= done_ns
        self._at_ns = now_ns
        self._share = share

    def next_end(self) -> int | None:
        """Return when its first piece is done if nothing changes; None when it has none."""
        if not self._pieces:
            return None
        least_ns = min(piece.left_ns for piece in self._pieces)
        return self._at_ns + max(0, round(least_ns * len(self._pieces) / self._share))

    def end(self, now_ns: int) -> Callable[[], None]:
        """End its first piece and return what is to be done then."""
        self.gets(self._share, now_ns)
        first = min(self._pieces, key=lambda piece: piece.left_ns)
        self._pieces.remove(first)
        return first.then
