"""What happened to tasks lately, for the stories that errors tell."""

from collections import deque

from serve.core.lifecycle import Cause, State
from serve.core.types import Nanos, TaskId

#: Moves remembered.
_LENGTH = 4096


#: When, who, from where (None: new), why, where to.
PastMove = tuple[Nanos, TaskId, State | None, Cause, State]


class History:
    """The last moves of all tasks."""

    __slots__ = ("_moves", "add")

    def __init__(self) -> None:
        self._moves: deque[PastMove] = deque(maxlen=_LENGTH)
        #: A task moved.
        self.add = self._moves.append

    def story(self, task_id: TaskId) -> tuple[str, ...]:
        """The task's moves as far as they are remembered, one line each."""
        return tuple(
            f"{now_ns} ns: {before.label if before else 'new'} → {after.label} ({cause.__name__})"
            for now_ns, moved_id, before, cause, after in self._moves
            if moved_id == task_id
        )
