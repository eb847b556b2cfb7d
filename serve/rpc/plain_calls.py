"""Calls whose requests the native front has staged: to the engine, and to their answers."""

from collections.abc import Callable

from serve.access.principal import ANYBODY, Principal
from serve.core.types import Outcome
from serve.errors import ServeError
from serve.native import PlainRequest
from serve.rpc.convert import encode_answer_head
from serve.rpc.elsewhere import Headers, hops_of
from serve.rpc.joint_calls import MODELS
from serve.rpc.parameters import decode_parameters
from serve.rpc.service import InferenceService
from serve.server.api import BetterElsewhere, InferCall
from serve.server.plain_requests import PlainRequests
from serve.server.ticket import Answer, PlainTicket

#: Keeps a record of a refused request; see ``api.Inference.refused``.
Refused = Callable[[str, str, str, int, ServeError, str], None]
#: Offset in the pool and size of an output, in bytes.
Place = tuple[int, int]


class PlainCalls:
    """Does for staged requests what ``InferenceService`` does for messages."""

    def __init__(self, plain: PlainRequests, refused: Refused, service: InferenceService) -> None:
        #: The engine's side.
        self.plain = plain
        self._refused = refused
        self._service = service
        self._submission = service.submission

    def submit(
        self,
        request: PlainRequest,
        arrived_ns: int,
        remaining_s: float,
        answer: Answer,
        caller: Principal = ANYBODY,
        trace_parent: str = "",
        headers: Headers = (),
    ) -> PlainTicket | None:
        """Submit a staged request, which is the ticket's from then on.

        Returns None for one that must go the way of messages: its model is served no more, it asks
        for a resident graph or for several models, or it had better be elsewhere. Raises
        ServeError for one that is refused; a refusal gets its row in the report.
        """
        hops, front_ns = 0, 0
        if headers:
            hops, front_ns = hops_of(headers), self._submission.front_ns(headers, arrived_ns)
        entry = self.plain.entry(request.token)
        given = request.parameters
        if entry is None or MODELS in given:
            return None
        name, version, client_id = entry.spec.name, request.version, request.client_id
        try:
            parameters = decode_parameters(given, remaining_s, caller)
            if parameters.graph is not None:
                return None
            call = InferCall(
                model=name,
                version=version,
                tensors={},
                arrived_ns=arrived_ns,
                client_id=client_id,
                wanted=tuple(request.wanted),
                trace_parent=trace_parent,
                hops=hops,
                front_ns=front_ns,
                movable=self._submission.elsewhere is not None and not hops,
                **parameters._asdict(),
            )
            return self.plain.submit(call, entry, request, answer)
        except BetterElsewhere:
            return None
        except ServeError as error:
            self._refused(name, version, client_id, arrived_ns, error, trace_parent)
            self._service.failed(name, str(entry.spec.version), arrived_ns)
            raise

    def finished(self, ticket: PlainTicket, outcome: Outcome) -> tuple[bytes, list[Place]]:
        """Return the head of the answer and the places of its outputs; raises ServeError."""
        try:
            record = ticket.finished(outcome)
            outputs = ticket.inputs.output_places(ticket.output_shape)
            head = encode_answer_head(ticket.call.client_id, record, outputs, self._submission.node)
        except Exception:
            spec = ticket.entry.spec
            self._service.failed(spec.name, str(spec.version), ticket.call.arrived_ns)
            raise
        self._service.succeeded(record)
        return head, [(ref.offset_bytes, ref.size_bytes) for ref in outputs]
