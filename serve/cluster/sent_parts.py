"""The parts of one request that were sent to the servers where their nodes live."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np

from serve.cluster.peers import Peer, leave_alone
from serve.core.types import (
    Expired,
    Failed,
    FailReason,
    Nanos,
    Outcome,
    Rejected,
    RejectReason,
    Withdrawn,
)
from serve.graphs.csr import Ids
from serve.rpc.convert import GRAPH_STATE
from serve.rpc.parameters import SPLIT
from serve.server.api import NODE_IDS, InferCall, ModelInfo
from serve.server.split import PartAnswer
from serve.wire.messages import (
    RETRY_TRAILER,
    ParameterValue,
    WireError,
    WireRequest,
    WireTensor,
    array_bytes,
    decode_response,
    encode_wire_request,
)

#: Parameters of a request that are not those of its parts: these have the whole's limit and target.
_OF_THE_WHOLE = ("timeout", "qos_target_us", SPLIT)
#: Longest that a part may take, where the client sets no limit.
MOST_PART_S = 60.0
_FAILURES: Mapping[grpc.StatusCode, FailReason] = {
    grpc.StatusCode.INVALID_ARGUMENT: FailReason.INVALID_INPUT,
    grpc.StatusCode.INTERNAL: FailReason.MODEL_ERROR,
}


def part_message(
    request: WireRequest, call: InferCall, model: ModelInfo, ids: Ids, seed: int
) -> bytes:
    """Serialize the request for `ids` alone, to the version of the model that was chosen."""
    parameters: dict[str, ParameterValue | None] = {
        name: value for name, value in request.parameters.items() if name not in _OF_THE_WHOLE
    }
    parameters["seed"] = seed
    tensor = WireTensor(NODE_IDS.name, NODE_IDS.datatype, (ids.size,), {})
    return encode_wire_request(
        WireRequest(
            model=model.name,
            version=model.version,
            request_id=call.client_id,
            parameters=parameters,
            inputs=[tensor],
            outputs=request.outputs,
            raws=[array_bytes(ids)],
        )
    )


class SentPart(NamedTuple):
    """A part on its way."""

    part: int
    there: Peer
    #: Places of its ids among those of the request.
    positions: Ids
    future: "grpc.Future[bytes]"

    @property
    def told(self) -> str:
        """Which part it is, for people."""
        return f"part {self.part} of the request, at {self.there.server},"


class SentParts:
    """Implements ``server.split.OtherParts``."""

    def __init__(
        self, sent: Sequence[SentPart], *, limit_s: float, left: Callable[[int, int], None]
    ) -> None:
        """Know the parts that were sent.

        Args:
            sent: One part or more.
            limit_s: Seconds that they were given.
            left: Is told once how many were answered, and how many were not.
        """
        self._sent = tuple(sent)
        self._limit_s = limit_s
        self._left = left
        self._answered = 0
        #: The client's thread may end it as well as the request's.
        self._lock = threading.Lock()
        self._ended = False

    def answers(self) -> Sequence[PartAnswer] | Outcome:
        """See ``OtherParts``; each has a deadline, so the wait ends."""
        found: list[PartAnswer] = []
        for one in self._sent:
            answer = self._answer(one)
            if not isinstance(answer, PartAnswer):
                return answer
            self._answered += 1
            found.append(answer)
        return found

    def end(self) -> None:
        """See ``OtherParts``."""
        for one in self._sent:
            one.future.cancel()
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended:
            self._left(self._answered, len(self._sent) - self._answered)

    def _answer(self, one: SentPart) -> PartAnswer | Outcome:
        try:
            response = decode_response(one.future.result())
        except grpc.RpcError as error:
            return _outcome(one, error, self._limit_s)
        except grpc.FutureCancelledError:
            return Withdrawn(f"at {one.there.server}")
        except WireError as error:
            return Failed(FailReason.ROWS_LOST, f"{one.told} sent no answer: {error}")
        state = response.parameters.get(GRAPH_STATE)
        outputs = {name: np.asarray(rows) for name, rows in response.outputs.items()}
        return PartAnswer(one.told, one.positions, outputs, state if isinstance(state, str) else "")


def _outcome(one: SentPart, error: grpc.RpcError, limit_s: float) -> Outcome:
    """Return how the request ends whose part ended in `error`."""
    code, message = error.code(), f"{one.told} failed: {error.details()}"
    if code is grpc.StatusCode.UNAVAILABLE:
        # When the request is sent again, its nodes are answered elsewhere.
        leave_alone(one.there)
    if code is grpc.StatusCode.CANCELLED:
        return Withdrawn(f"at {one.there.server}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        if limit_s >= MOST_PART_S:
            told = f"{one.told} was not answered in {limit_s:g} s"
            return Failed(FailReason.ROWS_LOST, told)
        return Expired(f"at {one.there.server}, which has part {one.part} of it")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        trailers: Any = error.trailing_metadata() or ()
        for name, value in trailers:
            if name == RETRY_TRAILER and str(value).isdecimal():
                again_ns = Nanos(int(value) * 1_000_000)
                return Rejected(RejectReason.QUEUE_FULL, message, again_ns)
        return Rejected(RejectReason.TOO_BIG, message)
    return Failed(_FAILURES.get(code, FailReason.ROWS_LOST), f"{message} ({code.name})")
