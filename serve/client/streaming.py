"""Which answer of a stream belongs to which request; shared by both clients."""

from collections import deque
from dataclasses import replace

from serve.client.errors import ClientError, InvalidRequest, from_failure
from serve.client.facts import Answer
from serve.client.requests import Request
from serve.wire.messages import Failure, decode_stream_answer

#: Position of the request in what was streamed, and its answer or what went wrong with it.
Outcome = tuple[int, Answer | ClientError]


class StreamBook:
    """Requests sent and not yet answered, by their id on the wire."""

    def __init__(self) -> None:
        self._count = 0
        self._sent: dict[str, int] = {}
        #: Outcomes of requests that were never sent.
        self.unsent: deque[Outcome] = deque()

    def enter(self, request: Request) -> Request:
        """`request` with an id to know its answer by; raises InvalidRequest for one in use."""
        index = self._count
        self._count += 1
        request_id = request.request_id or f"stream-{index}"
        if request_id in self._sent:
            raise InvalidRequest(
                "INVALID_ARGUMENT", f"request_id '{request_id}' is in use on this stream"
            )
        self._sent[request_id] = index
        return replace(request, request_id=request_id)

    def drop(self, request: Request, error: ClientError) -> None:
        """`request` could not be sent."""
        self.unsent.append((self._sent.pop(request.request_id), error))

    def settle(self, message: bytes) -> Outcome:
        """The outcome that came in `message`."""
        found = decode_stream_answer(message)
        index = self._sent.pop(found.request_id, -1)
        if isinstance(found, Failure):
            return index, from_failure(found)
        return index, Answer.of(found)
