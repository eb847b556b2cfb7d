"""Cancellation of a request in flight."""

from serve.server.api import JointTicket, Ticket


class Cancellation:
    """Connects a call's cancellation to the request's ticket, in whichever order they arrive."""

    def __init__(self) -> None:
        self._ticket: Ticket | JointTicket | None = None
        self._cancelled = False

    def submitted(self, ticket: Ticket | JointTicket) -> None:
        """Note that the request was submitted; cancels it if the client has already gone."""
        self._ticket = ticket
        if self._cancelled:
            ticket.cancel()

    def finished(self) -> None:
        """Note that the request is answered; a later cancellation has no effect."""
        self._ticket = None

    def cancel(self) -> None:
        """Cancel the request, now or when it is submitted. Thread-safe and idempotent."""
        # NOTE: this writes the flag and then reads the ticket; `submitted` writes the ticket and
        # then reads the flag. However the two threads interleave, at least one of them sees both
        # and cancels; cancelling twice is harmless.
        self._cancelled = True
        ticket = self._ticket
        if ticket is not None:
            ticket.cancel()
