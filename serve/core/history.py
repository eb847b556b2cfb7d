"""What happened to tasks lately, for the stories that errors tell."""

from collections import deque

from serve.core.lifecycle import State
from serve.core.types import Nanos, TaskId

#: Moves remembered.
_LENGTH = 4096


class History:
    """The last moves of all tasks."""

    __slots__ = ("_moves",)

    def __init__(self) -> None:
        self._moves: deque[tuple[Nanos, TaskId, State | None, str, State]] = deque(maxlen=_LENGTH)

    def add(
        self, now_ns: Nanos, task_id: TaskId, before: State | None, cause: str, after: State
    ) -> None:
        """A task moved; `before` is None when it was new."""
        self._moves.append((now_ns, task_id, before, cause, after))

    def story(self, task_id: TaskId) -> tuple[str, ...]:
        """The task's moves as far as they are remembered, one line each."""
        return tuple(
            f"{now_ns} ns: {before.label if before else 'new'} → {after.label} ({cause})"
            for now_ns, moved_id, before, cause, after in self._moves
            if moved_id == task_id
        )
