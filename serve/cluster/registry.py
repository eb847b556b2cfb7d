"""Which servers a cluster has, as they say themselves, and which get requests.

Servers say so again and again. Whatever happens to the registry, it knows them all a moment later.
"""

from collections.abc import Sequence

import msgspec

from serve.cluster.figures import Figures
from serve.core.cluster.events import (
    ContactLost,
    DrainAsked,
    MachineAnnounced,
    MachineDied,
    ProbeMissed,
    ProbePassed,
)
from serve.core.cluster.members import MachineState, Member, Members
from serve.core.cluster.seats import OwnSeat
from serve.core.cluster.views import MachineFacts
from serve.errors import UnknownName

#: A server that said nothing for so long is not well; whether it serves, the front knows better.
SILENT_S = 3.0


class Announcement(msgspec.Struct, frozen=True):
    """What a server says of itself."""

    #: `host:port` for gRPC and for HTTP.
    address: str
    http_address: str
    #: Time of its start, Unix ns.
    incarnation: int
    #: Name of its machine, for people.
    machine: str
    #: Of what it was started with.
    fingerprint: str = ""
    ready: bool = False
    #: It was drained when it was last told, or found so.
    drained: bool = False
    #: Of the update that it was started by.
    generation: str = ""
    #: What it has done since its replica is there.
    figures: Figures = Figures()
    #: Its part of graphs that are shared out; None where none is.
    seat: OwnSeat | None = None


class SeatGiven(msgspec.Struct, frozen=True):
    """What a server is told when it has asked for a seat."""

    seat: OwnSeat
    #: Address and part of each server; none while a part has no server.
    stores: list[tuple[str, int]]


class Standing(msgspec.Struct, frozen=True):
    """What a server is told when it has announced itself."""

    #: It gets no new requests from the front.
    drained: bool
    #: Servers to which it may pass requests on, and those of them that are drained: `host:port` for
    #: gRPC.
    servers: list[str]
    drained_servers: list[str]
    #: Servers of graphs that are shared out, and whether this one is still to be one of them.
    stores: list[tuple[str, int]] = []
    seated: bool = True


class ServerRow(msgspec.Struct, frozen=True):
    """A server as operators see it."""

    machine: str
    address: str
    http_address: str
    #: Of ``MachineState``.
    state: str
    fingerprint: str
    #: Of the update that it was started by; empty for none.
    generation: str = ""
    #: Part of graphs that are shared out; None where none is.
    part: int | None = None


class Registry:
    """The servers of one cluster. Not thread-safe."""

    def __init__(
        self, forget_s: float, known: Sequence[Announcement] = (), now_s: float = 0.0
    ) -> None:
        """Forget servers that said nothing for `forget_s`; `known` is what was said before."""
        self._forget_s = forget_s
        self._members = Members()
        self._said: dict[str, Announcement] = {}
        self._heard_s: dict[str, float] = {}
        self._drained: set[str] = set()
        for said in known:
            self.announce(said, now_s)

    def announce(self, said: Announcement, now_s: float) -> bool:
        """Take in what a server says; returns whether it gets no new requests."""
        known = self._said.get(said.address)
        # A machine has one server at a time.
        of_machine = [one for one in self._said.values()
                      if one.machine == said.machine or one is known]  # fmt: skip
        if any(one.incarnation > said.incarnation for one in of_machine):
            return said.drained  # a server that has been replaced
        for one in of_machine:
            if one.address != said.address:
                self.left(one.address, one.incarnation)
        if known is None or known.incarnation != said.incarnation:
            # After a loss of the registry the server knows whether it was drained.
            self._drained.discard(said.address)
            if said.drained:
                self._drained.add(said.address)
        self._take(said, now_s)
        return said.address in self._drained

    def left(self, address: str, incarnation: int) -> None:
        """Forget a server that ended in order, unless a later one has its address."""
        member = self._members.get(address, incarnation)
        if member is not None:
            self._members.take(MachineDied(address, incarnation))
            self._forget(member)

    def drain(self, name: str, *, back: bool = False) -> list[str]:
        """Send a machine, or a server by its address, no new requests; or with `back`, again.

        Returns the addresses; raises UnknownName.
        """
        found = [one.address for one in self._said.values() if name in (one.machine, one.address)]
        if not found:
            known = ", ".join(sorted({one.machine for one in self._said.values()})) or "none"
            raise UnknownName(f"machine '{name}' is not in the cluster; known: {known}")
        for address in found:
            member = self._members.get(address)
            assert member is not None
            incarnation = member.view.facts.incarnation
            if not back:
                self._drained.add(address)
                self._members.take(DrainAsked(address, incarnation))
            elif address in self._drained:
                self._drained.discard(address)
                self._members.forget(member)
                self._members.take(MachineAnnounced(MachineFacts(address, incarnation)))
        return found

    def look(self, now_s: float) -> None:
        """Take in who said nothing for long."""
        for member in tuple(self._members):
            silent_s = now_s - self._heard_s[member.name]
            if silent_s > self._forget_s:
                self._forget(member)
            elif silent_s > SILENT_S and member.state is MachineState.READY:
                self._members.take(ProbeMissed(member.name, member.view.facts.incarnation))

    def servers(self) -> tuple[list[str], list[str]]:
        """Return the addresses for a front, and those of them that are drained.

        A server that says nothing is among them: the front finds out whether it serves.
        """
        return sorted(self._said), sorted(self._drained & self._said.keys())

    def known(self) -> list[Announcement]:
        """Return what is known of each server, for a registry that takes this one's place."""
        return [
            msgspec.structs.replace(said, drained=address in self._drained, figures=Figures())
            for address, said in sorted(self._said.items())
        ]

    def has(self, generation: str) -> bool:
        """Return True while there is a server that an update of this generation started."""
        return any(said.generation == generation for said in self._said.values())

    @property
    def ready_count(self) -> int:
        """Servers that are ready, and not drained."""
        return sum(self._state(address) == MachineState.READY.value for address in self._said)

    def rows(self) -> list[ServerRow]:
        """Return all servers, by machine."""
        rows = [
            ServerRow(
                said.machine, said.address, said.http_address, self._state(said.address),
                said.fingerprint, said.generation, None if said.seat is None else said.seat.part,
            )
            for said in self._said.values()
        ]  # fmt: skip
        return sorted(rows, key=lambda row: (row.machine, row.address))

    def _state(self, address: str) -> str:
        member = self._members.get(address)
        return MachineState.GONE.value if member is None else member.state.value

    def _take(self, said: Announcement, now_s: float) -> None:
        address, incarnation = said.address, said.incarnation
        self._said[address], self._heard_s[address] = said, now_s
        self._members.take(MachineAnnounced(MachineFacts(address, incarnation)))
        if address in self._drained:
            self._members.take(DrainAsked(address, incarnation))
        cause = ProbePassed if said.ready else ContactLost
        self._members.take(cause(address, incarnation))

    def _forget(self, member: Member) -> None:
        self._members.forget(member)
        self._said.pop(member.name, None)
        self._heard_s.pop(member.name, None)
        self._drained.discard(member.name)
