"""What a process does, by what the kernel counts of its threads."""

import os
from pathlib import Path

from serve.core.types import LaneLook, LaneState, Nanos

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
#: Fields of `stat` behind the name, which may hold anything.
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
_TURNS = ("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")


def look(pid: int) -> LaneLook | None:
    """What the process does now; None: it is gone."""
    states: set[str] = set()
    ticks = turns = 0
    try:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            states.add(fields[_STATE])
            ticks += int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
            for line in (folder / "status").read_text().splitlines():
                if line.startswith(_TURNS):
                    turns += int(line.split()[1])
    except OSError:
        return None  # or one of its threads is, which is progress
    return LaneLook(_state(states), Nanos(ticks * _TICK_NS), turns)


def _state(states: set[str]) -> LaneState:
    if states & {"T", "t"}:
        return LaneState.STOPPED
    # One that waits for a core or for a disk is kept from going on.
    return LaneState.ASLEEP if states == {"S"} else LaneState.BUSY
