"""Disciplines: their interface, the moves they may propose, and their registry."""

from typing import Protocol

import msgspec

from serve.core.named_choices import NamedChoices
from serve.core.state.device_state import Board
from serve.core.state.record import Record, Run
from serve.core.types import Nanos


class LaunchMove(msgspec.Struct, frozen=True):
    """Start a READY task on an idle lane."""

    record: Record
    #: READY tasks ahead of it that do not fit now and are passed over.
    bypassed: tuple[Record, ...] = ()


class ResumeMove(msgspec.Struct, frozen=True):
    """Let a suspended run go on."""

    run: Run


class SuspendMove(msgspec.Struct, frozen=True):
    """Stop an executing run in favour of a more urgent task, which takes its slot."""

    run: Run
    favoured: LaunchMove | ResumeMove


class WaitMove(msgspec.Struct, frozen=True):
    """Nothing to do before something happens, or before `until_ns`."""

    until_ns: Nanos | None = None


Move = LaunchMove | SuspendMove | ResumeMove | WaitMove
WAIT = WaitMove()


class Discipline(Protocol):
    """Decides what of the plan runs now. Stateless; reads the board, changes nothing."""

    name: str
    #: A started group stays until all of it has ended, and nothing else starts meanwhile.
    holds_groups: bool
    #: Tasks are suspended, so it wants more lanes than execute at once.
    suspends: bool

    def could_start(self, board: Board) -> bool:
        """Return True when a task planned now, at the front, could be launched at once."""
        ...

    def decide(self, board: Board, bypass_limit: int, now_ns: Nanos) -> Move:
        """Return the next move. The scheduler asks again after each until it is told to wait."""
        ...


DISCIPLINES: NamedChoices[Discipline] = NamedChoices("discipline")
register_discipline = DISCIPLINES.register
