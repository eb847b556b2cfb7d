"""Matching of a stream's answers to its requests; shared by both clients."""

from collections import deque
from dataclasses import replace

from serve.client.errors import ClientError, InvalidRequest, from_failure
from serve.client.facts import Answer
from serve.client.requests import Request
from serve.wire.messages import Failure, decode_stream_answer

#: Position of the request in the stream, and its answer or its error.
Outcome = tuple[int, Answer | ClientError]


class PendingRequests:
    """Requests that are sent and not yet answered, by their id on the wire."""

    def __init__(self) -> None:
        self._count = 0
        self._sent: dict[str, int] = {}
        #: Outcomes of requests that could not be sent.
        self.unsent: deque[Outcome] = deque()

    def enter(self, request: Request) -> Request:
        """Return `request` with an id of its own; raises InvalidRequest when its id is in use."""
        index = self._count
        self._count += 1
        request_id = request.request_id or f"stream-{index}"
        if request_id in self._sent:
            raise InvalidRequest.local(f"request_id '{request_id}' is in use on this stream")
        self._sent[request_id] = index
        return replace(request, request_id=request_id)

    def drop(self, request: Request, error: ClientError) -> None:
        """Note that `request` could not be sent."""
        self.unsent.append((self._sent.pop(request.request_id), error))

    def settle(self, message: bytes) -> Outcome:
        """Return the outcome that `message` carries."""
        found = decode_stream_answer(message)
        index = self._sent.pop(found.request_id, -1)
        if isinstance(found, Failure):
            return index, from_failure(found)
        return index, Answer.of(found)
