"""Cancellation of a request in flight."""

from typing import Protocol


class Cancellable(Protocol):
    """What a request is while it is on its way: a ticket, or a call to another server."""

    def cancel(self) -> object:
        """End it. Any thread, any number of times."""
        ...


class Cancellation:
    """Connects a call's cancellation to the request's ticket, in whichever order they arrive."""

    def __init__(self) -> None:
        self._ticket: Cancellable | None = None
        self._cancelled = False

    def submitted(self, ticket: Cancellable) -> None:
        """Note that the request was submitted; cancels it if the client has already gone."""
        self._ticket = ticket
        if self._cancelled:
            ticket.cancel()

    def finished(self) -> None:
        """Note that the request is answered; a later cancellation has no effect."""
        self._ticket = None

    @property
    def cancelled(self) -> bool:
        """True once the client has gone."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the request, now or when it is submitted. Thread-safe and idempotent."""
        # NOTE: this writes the flag and then reads the ticket; `submitted` writes the ticket and
        # then reads the flag. However the two threads interleave, at least one of them sees both
        # and cancels; cancelling twice is harmless.
        self._cancelled = True
        ticket = self._ticket
        if ticket is not None:
            ticket.cancel()
