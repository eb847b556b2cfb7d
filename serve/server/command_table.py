"""The scheduler's commands carried out on the lanes and tickets. Belongs to the driver's lock."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, get_args

from serve.core.commands import (
    AddLane,
    AnswerTask,
    Command,
    KillLane,
    LaunchTask,
    LookAtLane,
    PrepareTask,
    QuarantineModel,
    RecycleLane,
    ReleaseTask,
    RemoveLane,
    ResumeTask,
    StopTask,
    SuspendTask,
)
from serve.core.events import Event, LaneSeen
from serve.core.jobs.commands import JobCommand, PauseJob
from serve.core.jobs.events import JobEvent
from serve.server.accepted import AcceptedRequests
from serve.server.lane_monitor import LaneMonitor
from serve.server.lanes.pool import LanePool

#: A job gives its core back before a lane takes it.
_TO_LANES = frozenset({PauseJob, LaunchTask, SuspendTask, ResumeTask, StopTask})


class JobPort(Protocol):
    """What carries out commands about training jobs; under the driver's lock."""

    #: Jobs that train now.
    running: int

    def carry_out(self, command: JobCommand) -> JobEvent | None:
        """Carry out a command without waiting; return an event that it caused at once."""
        ...

    def keep_off_lanes(self) -> None:
        """Move jobs from cores on which lanes execute."""
        ...


class CommandTable:
    """What to do for each class of command. None of it blocks."""

    def __init__(
        self, requests: AcceptedRequests, lanes: LaneMonitor, pool: LanePool, jobs: JobPort
    ) -> None:
        self._requests, self._lanes, self._pool, self._jobs = requests, lanes, pool, jobs
        #: Events that commands caused at once.
        self._caused: list[Event] = []
        self._do: dict[type[Command], Callable[[Any], None]] = {
            PrepareTask: self._prepare,
            LaunchTask: self._launch,
            SuspendTask: lambda command: pool.suspend(command.lane_id),
            ResumeTask: lambda command: pool.resume(command.lane_id),
            StopTask: lambda command: pool.stop_run(command.lane_id, command.task_id),
            LookAtLane: self._look,
            KillLane: self._kill,
            AnswerTask: self._answer,
            ReleaseTask: self._release,
            AddLane: lambda command: pool.add_lane(command.lane_id, command.domain),
            RemoveLane: lambda command: lanes.remove(command.lane_id),
            RecycleLane: lambda command: lanes.recycle(command.lane_id, command.reason),
            QuarantineModel: lambda command: lanes.quarantined(command.model, command.reason),
            **dict.fromkeys(get_args(JobCommand), self._of_job),
        }

    def carry_out(self, commands: Sequence[Command]) -> Sequence[Event]:
        """Carry out all commands; return the events that they caused at once, to be handled."""
        if len(commands) > 1:
            # Lanes first: a thread that is woken takes the core and the interpreter lock, while a
            # lane that could run waits.
            commands = sorted(commands, key=_comes_after_lanes)
        for command in commands:
            self._do[type(command)](command)
        if self._jobs.running:
            self._jobs.keep_off_lanes()
        if not self._caused:
            return ()
        caused, self._caused = self._caused, []
        return caused

    def _of_job(self, command: JobCommand) -> None:
        if (event := self._jobs.carry_out(command)) is not None:
            self._caused.append(event)

    def _prepare(self, command: PrepareTask) -> None:
        if (prepared := self._requests[command.task_id].command_prepare()) is not None:
            self._caused.append(prepared)

    def _launch(self, command: LaunchTask) -> None:
        task_ids = command.task_id, *command.companions
        tickets = [self._requests[task_id] for task_id in task_ids]
        self._lanes.launch(command.lane_id, tickets, command.reserve_bytes, bounded=command.bounded)

    def _look(self, command: LookAtLane) -> None:
        look = self._pool.look(command.lane_id, command.task_id)
        if look is not None:
            self._caused.append(LaneSeen(command.task_id, command.lane_id, look))

    def _kill(self, command: KillLane) -> None:
        model = self._requests[command.task_id].entry.spec.key
        self._pool.kill(command.lane_id, f"a run of {model} stands still")

    def _answer(self, command: AnswerTask) -> None:
        self._requests[command.task_id].command_answer(command.outcome)

    def _release(self, command: ReleaseTask) -> None:
        self._requests.remove(command.task_id).release()


def _comes_after_lanes(command: Command) -> bool:
    return type(command) not in _TO_LANES
