"""The requests that were accepted and whose tasks have not ended. Belongs to the driver's lock."""

from collections.abc import Callable

from serve.core.types import TaskId
from serve.server import clock
from serve.server.learning.alone import IDLE_NS
from serve.server.ticket import RequestTicket


class AcceptedRequests:
    """Tickets by task, and which of them came alone."""

    def __init__(self) -> None:
        self._tickets: dict[TaskId, RequestTicket] = {}
        self._newest: RequestTicket | None = None
        self._idle_since_ns = 0
        #: Called when the last task has ended; None: nobody.
        self.on_idle: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, task_id: TaskId) -> bool:
        return task_id in self._tickets

    def __getitem__(self, task_id: TaskId) -> RequestTicket:
        return self._tickets[task_id]

    @property
    def idle_since_ns(self) -> int | None:
        """When the last task ended, 0 before the first; None while there are tasks. Any thread."""
        return None if self._tickets else self._idle_since_ns

    def tickets(self) -> tuple[RequestTicket, ...]:
        """Return a snapshot of all tickets. Any thread."""
        return tuple(self._tickets.values())

    def add(self, ticket: RequestTicket) -> None:
        """Take a request in, and note whether it came alone to an idle server."""
        if self._newest is not None:
            self._newest.alone = False
        ticket.alone = not self._tickets and ticket.call.arrived_ns - self._idle_since_ns >= IDLE_NS
        self._newest = ticket
        self._tickets[ticket.task.task_id] = ticket
        ticket.entry.inflight += 1

    def answered(self, ticket: RequestTicket) -> None:
        """Note that the serving thread is done; a retired version without requests is idle."""
        entry = ticket.entry
        entry.inflight -= 1
        if entry.retired and entry.inflight == 0:
            entry.idle.set()

    def remove(self, task_id: TaskId) -> RequestTicket:
        """Forget a task that has ended, and return its ticket."""
        ticket = self._tickets.pop(task_id)
        if ticket is self._newest:
            self._newest = None  # or its tensors would stay
        if not self._tickets:
            self._idle_since_ns = clock.now_ns()
            if self.on_idle is not None:
                self.on_idle()
        return ticket
