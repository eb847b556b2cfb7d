"""Which server of a cluster holds which part of the graphs that are shared out.

A cluster of n servers has n seats. Seat i is one for part i modulo the number of parts, so no part
has two servers more than another. A server takes a seat before it starts and keeps it while it
runs. Who has the first seat orders changes, and needs the log of those that were made before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

#: Who said nothing for so long may lose its seat, and who is about to start after this.
SILENT_NS, START_NS = 3_000_000_000, 60_000_000_000


@dataclass(frozen=True, slots=True)
class SeatAsked:
    """A server that is about to start, or found running, asks for a seat."""

    #: Name of its machine, which has one server at a time.
    machine: str
    #: `host:port` where it gives features.
    address: str
    #: The file of changes is on its machine.
    has_log: bool = False
    #: Seat with which it runs already; None: it does not run.
    held: int | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """A seat, and the server that took it last."""

    number: int
    machine: str
    address: str
    #: Until when it is taken, if nothing is heard of the server before.
    until_ns: int = 0
    #: The server ended in order.
    left: bool = False
    #: The server has been ready.
    ready: bool = False
    #: One that had this seat before it has been ready.
    used: bool = False
    #: Address of a silent server of another machine, which may go on until this one is ready.
    before: str = ""

    def is_live(self, now_ns: int) -> bool:
        """Return True when its server is there, as far as is known."""
        return not self.left and now_ns < self.until_ns


@dataclass(frozen=True, slots=True)
class OwnSeat:
    """The seat of a server, as the server knows it."""

    number: int
    part: int
    #: `host:port` where it gives features.
    address: str


class Seats:
    """The seats of one cluster. Pure, not thread-safe."""

    def __init__(self, parts: int, known: Sequence[Seat] | None = (), now_ns: int = 0) -> None:
        """Share out so many parts.

        `known` are seats of before, whose servers are to be heard. None: there were some, and
        nothing is known of them any more.
        """
        self._parts = parts
        self._forgot = known is None
        self._taken = {
            seat.number: replace(seat, until_ns=now_ns + START_NS) for seat in known or ()
        }  # fmt: skip

    def part_of(self, number: int) -> int:
        """Return the part that a seat is for."""
        return number % self._parts

    def take(self, asked: SeatAsked, count: int, now_ns: int) -> Seat | str:
        """Give the server one of `count` seats; returns why there is none for it otherwise.

        The one that it has, or one of a part that has the fewest servers: free, or where all are
        taken, of a server that is silent.
        """
        seat = self._own(asked)
        free = [number for number in range(count) if self._is_free(number)]
        if seat is None and not free:
            free = [one.number for one in self._taken.values() if not one.is_live(now_ns)]
        numbers = sorted(free, key=lambda number: self._order(number, asked, now_ns))
        if seat is not None:
            numbers = [seat.number]
        if not numbers:
            return f"all {count} servers are there"
        for number in numbers:
            if number or asked.has_log or not self._may_have_changes():
                self._taken[number] = found = self._given(number, asked, now_ns)
                return found
        before = self._taken.get(0)
        where = f" {before.machine} has it or had it:" if before else ""
        return (
            f"the server on {asked.machine} is to order changes, and the log of those that were"
            f" made is not there;{where} name a file in cluster.rows.log that all machines share,"
            " or begin without changes: `gnnserve cluster down`, then `up`"
        )

    def heard(self, number: int, said: SeatAsked, *, ready: bool, now_ns: int) -> bool:
        """Take note that a server has that seat; returns False when another one has it."""
        seat = self._taken.get(number)
        if seat is None:
            seat = Seat(number, said.machine, said.address)
        elif seat.address != said.address:
            return False
        until_ns = max(now_ns + SILENT_NS, 0 if seat.ready or ready else seat.until_ns)
        ready = seat.ready or ready
        before = "" if ready else seat.before
        self._taken[number] = replace(
            seat, until_ns=until_ns, left=False, ready=ready, before=before
        )
        return True

    def left(self, address: str) -> None:
        """Take note that the server which gave features at that address ended."""
        for number, seat in self._taken.items():
            if seat.address == address:
                self._taken[number] = replace(seat, left=True)
            elif seat.before == address:
                self._taken[number] = replace(seat, before="")

    def stores(self) -> list[tuple[str, int]]:
        """Return the address and part of each server, who orders changes first.

        A server that is lost stays until another with its seat is ready: it may be silent to the
        cluster alone. Empty while a part has no server.
        """
        here = {seat.address for seat in self._taken.values() if not seat.left}
        # A server that took another seat has nothing more of the part that it had.
        seats = [seat for seat in self.known() if not (seat.left and seat.address in here)]
        parts = {self.part_of(seat.number) for seat in seats}
        if len(parts) < self._parts or seats[0].number != 0:
            return []
        found = {seat.address: self.part_of(seat.number) for seat in seats}
        for seat in seats:
            if seat.before:
                found.setdefault(seat.before, self.part_of(seat.number))
        return list(found.items())

    def known(self) -> list[Seat]:
        """Return the seats that were taken, for seats that take the place of these."""
        return [self._taken[number] for number in sorted(self._taken)]

    def _own(self, asked: SeatAsked) -> Seat | None:
        """Return the seat that the server has, or that its machine's has lost without a word."""
        if asked.held is not None:
            seat = self._taken.get(asked.held) or Seat(asked.held, asked.machine, asked.address)
            if seat.address == asked.address:
                return seat
        of_machine = (one for one in self.known() if one.machine == asked.machine and not one.left)
        return next(of_machine, None)

    def _is_free(self, number: int) -> bool:
        seat = self._taken.get(number)
        return seat is None or seat.left

    def _order(self, number: int, asked: SeatAsked, now_ns: int) -> tuple[int, bool, int]:
        """Return what is least for the seat to give: of few servers, and last of this machine."""
        part, seat = self.part_of(number), self._taken.get(number)
        live = sum(self.part_of(one.number) == part for one in self._live(now_ns))
        return live, seat is None or seat.machine != asked.machine, number

    def _given(self, number: int, asked: SeatAsked, now_ns: int) -> Seat:
        """Return the seat as the server has it that takes it now."""
        given = Seat(number, asked.machine, asked.address, now_ns + START_NS)
        last = self._taken.get(number)
        if last is None:
            return replace(given, used=self._forgot)
        given = replace(given, used=last.used or last.ready, before=last.before)
        if last.address == asked.address:
            return replace(given, ready=last.ready)
        # A machine has one server at a time.
        goes_on = last.ready and not last.left and last.machine != asked.machine
        return replace(given, before=last.address) if goes_on else given

    def _may_have_changes(self) -> bool:
        """Return True when servers, which may all be lost by now, may have made changes."""
        return self._forgot or any(one.ready or one.used for one in self._taken.values())

    def _live(self, now_ns: int) -> Iterator[Seat]:
        return (one for one in self._taken.values() if one.is_live(now_ns))
