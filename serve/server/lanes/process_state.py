"""The state of a process by the kernel's accounts of its threads: stopped, asleep or busy."""

import os
from pathlib import Path

import msgspec

from serve.core.types import LaneLook, LaneState, Nanos, TaskId
from serve.ipc.shared_pool import SharedPool
from serve.server import clock
from serve.server.lanes.lane_handle import LaneHandle

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
#: Fields of `stat` after the name, which may hold any character.
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
_SWITCHES = ("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")


def look(pid: int) -> LaneLook | None:
    """Return state, CPU time and context switches of the process; None when it is gone."""
    states: set[str] = set()
    ticks = switches = 0
    try:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            states.add(fields[_STATE])
            ticks += int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
            for line in (folder / "status").read_text().splitlines():
                if line.startswith(_SWITCHES):
                    switches += int(line.split()[1])
    except OSError:
        return None  # or a thread of it is gone, which is progress too
    return LaneLook(_state(states), Nanos(ticks * _TICK_NS), switches)


def look_at(lane: LaneHandle, shared: SharedPool, task_id: TaskId) -> LaneLook | None:
    """Return what a lane, which runs that task, does now; None when its process is gone."""
    process, pid = lane.process, lane.process.pid
    seen = None if pid is None else look(pid)
    if seen is None or seen.state is LaneState.STOPPED:
        return seen
    if process.place is not None:
        # The process's threads do not show what its device does for the lane.
        return msgspec.structs.replace(seen, state=LaneState.BUSY, cpu_ns=Nanos(clock.now_ns()))
    if seen.state is LaneState.ASLEEP and shared.runs(lane.words) != task_id:
        return msgspec.structs.replace(seen, state=LaneState.IDLE)
    return seen


def _state(states: set[str]) -> LaneState:
    if states & {"T", "t"}:
        return LaneState.STOPPED
    # A thread that waits for a core or for a disk counts as busy.
    return LaneState.ASLEEP if states == {"S"} else LaneState.BUSY
