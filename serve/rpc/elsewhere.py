"""Other servers that may answer a request in place of this one."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from serve.access.callers import AUTHORIZATION
from serve.access.front_stamps import ARRIVED
from serve.core.types import Task
from serve.rpc.cancellation import Cancellation
from serve.server.api import InferCall, ModelInfo, Room
from serve.server.split import IdHomes
from serve.wire.messages import REGION, WireRequest

#: Header of a request that another server has passed on: it is passed on no more.
HOPS = "gnnserve-hops"
#: Header of a part of a request that another server has split: the target of the whole, in ns.
PART = "gnnserve-part"
_MOST_NS = 2**63 - 1


#: Headers of a call.
Headers = Sequence[tuple[str, str | bytes]]


class Origin(NamedTuple):
    """A request as it came, and what its headers say of its way."""

    #: Serialized.
    message: bytes | memoryview
    #: Servers that have passed it on.
    hops: int = 0
    #: Its header of that name; empty without.
    authorization: str = ""
    #: What a front says of its arrival there, see ``front_stamps``; empty without.
    stamp: str = ""
    #: Target of the request that it is a part of; 0 for none.
    part_target_ns: int = 0


class Elsewhere(Protocol):
    """The other servers. Any thread may call any method."""

    #: Name of this server among them.
    node: str

    def better(self, task: Task, room: Room) -> bool:
        """Return True when a task had better be elsewhere, as far as is known without asking."""
        ...

    def answer(
        self,
        request: WireRequest,
        origin: Origin,
        task: Task | None,
        remaining_s: float,
        cancellation: Cancellation,
    ) -> bytes | None:
        """Have another server answer; None to answer here, also once it is cancelled.

        Args:
            request: What came, decoded.
            origin: What came, as it is sent on.
            task: What it would be here; None when its model or graph is not here.
            remaining_s: Seconds until the call's deadline.
            cancellation: Passes the call's cancellation on.
        """
        ...

    def split(
        self,
        request: WireRequest,
        call: InferCall,
        model: ModelInfo,
        origin: Origin,
        homes: IdHomes,
        remaining_s: float,
        cancellation: Cancellation,
    ) -> InferCall | bytes | None:
        """Send the parts of a call whose nodes live elsewhere to where they do.

        Args:
            request: What came, decoded.
            call: The same; not split yet.
            model: The version that answers it.
            origin: What came, as it is sent on.
            homes: Where its nodes live.
            remaining_s: Seconds until the call's deadline.
            cancellation: Passes the call's cancellation on.

        Returns the call for what stays here; the answer of another server that has all of its
        nodes; or None where nothing was sent.
        """
        ...


def hops_of(headers: Headers) -> int:
    """Return how many servers have passed on a call with these headers: 0 or 1."""
    return int(any(name == HOPS for name, _ in headers))


def origin_of(message: bytes | memoryview, headers: Headers) -> Origin:
    """Return where a call with these headers came from."""
    hops, authorization, stamp, target_ns = 0, "", "", 0
    for name, value in headers:
        if name == HOPS:
            hops = 1
        elif name == AUTHORIZATION and isinstance(value, str):
            authorization = value
        elif name == ARRIVED and isinstance(value, str):
            stamp = value
        elif name == PART and isinstance(value, str) and value.isdecimal():
            target_ns = min(_MOST_NS, int(value[:19]))
    return Origin(message, hops, authorization, stamp, target_ns if hops else 0)


def is_movable(request: WireRequest, origin: Origin) -> bool:
    """Return True unless it was passed on already, or has tensors in this host's memory."""
    if origin.hops:
        return False
    parameters = [one.parameters for one in request.inputs]
    parameters += [one.parameters for one in request.outputs]
    return not any(REGION in each for each in parameters)
