"""Matching of a stream's answers to its requests; shared by both clients."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from serve.client.answers import Answer
from serve.client.errors import ClientError, InvalidRequest, from_failure
from serve.client.requests import Request
from serve.wire.messages import Failure, decode_stream_answer

#: Position of the request in the stream, and its answer or its error.
Outcome = tuple[int, Answer | ClientError]


class PendingRequests:
    """Requests that are sent and not yet answered, by their id on the wire."""

    def __init__(self, timeout_s: float | None = None) -> None:
        """Begin with none; `timeout_s` is the time limit of requests without one."""
        self._timeout_s = timeout_s
        self._count = 0
        self._sent: dict[str, int] = {}
        #: Nodes and rows of each graph, for requests that hold several, by id.
        self._graphs: dict[str, tuple[tuple[int, ...], Mapping[str, tuple[int, ...]]]] = {}
        #: Outcomes of requests that could not be sent.
        self.unsent: deque[Outcome] = deque()

    def enter(self, request: Request) -> Request:
        """Return `request` with an id and a time limit.

        Raises InvalidRequest when its id is in use, and for a list of models.
        """
        if request.is_joint:
            raise InvalidRequest.local("model: a request of a stream asks one model, not a list")
        index = self._count
        self._count += 1
        request_id = request.request_id or f"stream-{index}"
        if request_id in self._sent:
            raise InvalidRequest.local(f"request_id '{request_id}' is in use on this stream")
        self._sent[request_id] = index
        timeout_s = self._timeout_s if request.timeout_s is None else request.timeout_s
        return replace(request, request_id=request_id, timeout_s=timeout_s)

    @property
    def awaited_count(self) -> int:
        """Requests that are sent, or about to be, and have no answer yet."""
        return len(self._sent)

    def sent(
        self,
        request: Request,
        graph_nodes: tuple[int, ...] | None,
        graph_rows: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Note the nodes and rows of each graph of a request that is about to be sent."""
        if graph_nodes is not None:
            self._graphs[request.request_id] = graph_nodes, graph_rows

    def drop(self, request: Request, error: ClientError) -> None:
        """Note that `request` could not be sent."""
        self._graphs.pop(request.request_id, None)
        self.unsent.append((self._sent.pop(request.request_id), error))

    def settle(self, message: bytes) -> Outcome:
        """Return the outcome that `message` carries."""
        found = decode_stream_answer(message)
        index = self._sent.pop(found.request_id, -1)
        graphs = self._graphs.pop(found.request_id, (None, None))
        if isinstance(found, Failure):
            return index, from_failure(found)
        return index, Answer.of(found, *graphs)
