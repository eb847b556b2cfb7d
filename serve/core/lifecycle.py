"""The life of a task: its states and every move between them.

Rules:

1. Everything that may change a task's state is a row of ``TRANSITIONS``; nothing else does.
2. A row's cause is the class of what happened: an event from outside (``events``), a command the
   scheduler decided on (``commands``), an outcome it decided on (``Expired``, ``Failed``), or
   ``UnionSplit``.
3. What a move entails follows from the flags of the two states, not from the row: entering an
   `answered` state sends the one ``AnswerTask``, leaving an `on_lane` state returns lane and
   memory, entering DONE sends the one ``ReleaseTask``. No `answered` state leads to one that is
   not, and nothing leaves DONE: this is why there is exactly one of each.
4. A row that leads back to its own state is a late event that changes nothing.
5. A pair that has no row cannot happen in a correct server: ``InvariantViolation``.

A task answered while somebody still uses its buffers does not end there: WITHDRAWN waits for the
host to finish preparing, ABANDONED for the lane to give it back, PARKED to be resumed for that.
A suspended task can still finish or fail: it did so just before it was stopped.
"""

from enum import Enum

import msgspec

from serve.core.commands import LaunchTask, PrepareTask, ResumeTask, SuspendTask
from serve.core.events import (
    LaneLost,
    PrepareFailed,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskOverran,
    TaskPrepared,
)
from serve.core.types import Expired, Failed


class State(Enum):
    """State of a task; its flags say what the state entails."""

    #: Admitted, waits to be planned and prepared.
    QUEUED = "queued", True, False, False, False
    #: The host stages its inputs.
    PREPARING = "preparing", True, False, False, False
    #: Prepared, waits for lane and memory.
    READY = "ready", True, False, False, False
    #: Executes on a lane, memory reserved.
    RUNNING = "running", False, True, True, False
    #: On a lane, memory reserved, stopped in favour of a more urgent task.
    SUSPENDED = "suspended", False, True, False, False
    #: Answered (cancelled, expired or given up) while the host still prepares it.
    WITHDRAWN = "withdrawn", False, False, False, True
    #: Answered (cancelled or expired) while executing, memory reserved.
    ABANDONED = "abandoned", False, True, True, True
    #: Answered (cancelled or expired) and suspended, memory reserved.
    PARKED = "parked", False, True, False, True
    #: Answered and released.
    DONE = "done", False, False, False, True

    # Members are one of a kind; Enum's own hash is written in Python and asked for in every step.
    __hash__ = object.__hash__

    def __init__(
        self, label: str, pending: bool, on_lane: bool, executing: bool, answered: bool
    ) -> None:
        self.label = label
        #: Waits to run; may be planned.
        self.pending = pending
        #: Holds a lane and its reserved memory.
        self.on_lane = on_lane
        #: Uses one of the slots the device has for work.
        self.executing = executing
        #: Its client has its answer.
        self.answered = answered


Cause = type[object]


class UnionSplit:
    """The union that the task ran in failed, whoever's doing it was: each runs by itself."""


TRANSITIONS: dict[tuple[State, Cause], State] = {
    (State.QUEUED, PrepareTask): State.PREPARING,
    (State.QUEUED, TaskCancelled): State.DONE,
    (State.QUEUED, Expired): State.DONE,
    (State.QUEUED, Failed): State.DONE,  # the budget shrank below its need
    (State.PREPARING, TaskPrepared): State.READY,
    (State.PREPARING, PrepareFailed): State.DONE,
    (State.PREPARING, TaskCancelled): State.WITHDRAWN,
    (State.PREPARING, Expired): State.WITHDRAWN,
    (State.PREPARING, Failed): State.WITHDRAWN,
    (State.READY, LaunchTask): State.RUNNING,
    (State.READY, TaskCancelled): State.DONE,
    (State.READY, Expired): State.DONE,
    (State.READY, Failed): State.DONE,
    (State.RUNNING, TaskFinished): State.DONE,
    (State.RUNNING, TaskFailed): State.DONE,
    (State.RUNNING, TaskCancelled): State.ABANDONED,
    (State.RUNNING, Expired): State.ABANDONED,
    (State.RUNNING, LaneLost): State.QUEUED,  # handed over, once
    (State.RUNNING, TaskOverran): State.QUEUED,  # runs again, alone, once
    (State.RUNNING, UnionSplit): State.QUEUED,  # runs again, by itself
    (State.RUNNING, Failed): State.DONE,  # lost its second lane, or overran all memory there is
    (State.RUNNING, SuspendTask): State.SUSPENDED,
    (State.SUSPENDED, ResumeTask): State.RUNNING,
    (State.SUSPENDED, TaskFinished): State.DONE,
    (State.SUSPENDED, TaskFailed): State.DONE,
    (State.SUSPENDED, TaskCancelled): State.PARKED,
    (State.SUSPENDED, Expired): State.PARKED,
    (State.SUSPENDED, LaneLost): State.QUEUED,
    (State.SUSPENDED, TaskOverran): State.QUEUED,
    (State.SUSPENDED, UnionSplit): State.QUEUED,
    (State.SUSPENDED, Failed): State.DONE,
    (State.WITHDRAWN, TaskPrepared): State.DONE,
    (State.WITHDRAWN, PrepareFailed): State.DONE,
    (State.WITHDRAWN, TaskCancelled): State.WITHDRAWN,
    (State.ABANDONED, TaskFinished): State.DONE,
    (State.ABANDONED, TaskFailed): State.DONE,
    (State.ABANDONED, TaskOverran): State.DONE,
    (State.ABANDONED, LaneLost): State.DONE,
    (State.ABANDONED, TaskCancelled): State.ABANDONED,
    (State.ABANDONED, SuspendTask): State.PARKED,
    (State.PARKED, ResumeTask): State.ABANDONED,
    (State.PARKED, TaskFinished): State.DONE,
    (State.PARKED, TaskFailed): State.DONE,
    (State.PARKED, TaskOverran): State.DONE,
    (State.PARKED, LaneLost): State.DONE,
    (State.PARKED, TaskCancelled): State.PARKED,
    (State.DONE, TaskCancelled): State.DONE,
}


class Transition(msgspec.Struct, frozen=True):
    """A row of the table, with what it entails read off the flags of its two states."""

    after: State
    #: Not a late event.
    changes: bool
    #: Tasks more, or fewer, that are to be prepared; that wait for a lane, prepared.
    queued: int
    ready: int
    #: Something may be launched after it that could not before.
    stirs: bool
    #: One of those below holds.
    entails: bool
    leaves_lane: bool
    #: It waits no longer.
    leaves_queue: bool
    #: Its work is done, or will never be.
    ends_work: bool
    answers: bool
    releases: bool


def _transition(before: State, after: State) -> Transition:
    worked = before.pending or before.on_lane
    entailed = (
        before.on_lane and not after.on_lane,
        before.pending and not after.pending,
        worked and not (after.pending or after.on_lane),
        after.answered and not before.answered,
        after is State.DONE,
    )
    queued, ready = ((after is state) - (before is state) for state in (State.QUEUED, State.READY))
    stirs = after is not State.PREPARING
    return Transition(after, after is not before, queued, ready, stirs, any(entailed), *entailed)


TRANSITION_OF = {
    (before, cause): _transition(before, after) for (before, cause), after in TRANSITIONS.items()
}


def mermaid() -> str:
    """Return the table as a Mermaid state diagram, without moves that change nothing."""
    causes: dict[tuple[State, State], list[str]] = {}
    for (state, cause), target in TRANSITIONS.items():
        if target is not state:
            causes.setdefault((state, target), []).append(cause.__name__)
    lines = ["stateDiagram-v2", f"    [*] --> {State.QUEUED.label}: TaskArrived"]
    lines += [
        f"    {state.label} --> {target.label}: {', '.join(names)}"
        for (state, target), names in causes.items()
    ]
    lines.append(f"    {State.DONE.label} --> [*]")
    return "\n".join(lines) + "\n"
