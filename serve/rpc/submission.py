"""The way of one request into the engine, or on to another server."""

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from serve.access.front_stamps import ARRIVED, FrontStamps
from serve.access.principal import Principal
from serve.errors import NotReady, ServeError, UnknownName, VersionReplaced
from serve.rpc.cancellation import Cancellation
from serve.rpc.convert import decode_call
from serve.rpc.elsewhere import Elsewhere, Headers, Origin, is_movable
from serve.server.api import BetterElsewhere, InferCall, Inference, ModelInfo, Ticket
from serve.server.clock import now_ns, wall_ns
from serve.server.regions import Regions
from serve.wire.messages import WireRequest

#: The model, the call that the engine got, and its ticket.
Submitted = tuple[ModelInfo, InferCall, Ticket]


class Submission:
    """Submits requests to the engine; any thread may."""

    def __init__(
        self, engine: Inference, regions: Regions, failed: Callable[[str, str, int], None]
    ) -> None:
        """`failed` counts a request for a model that ends in an error; see ``InferenceService``."""
        self._engine = engine
        self._regions = regions
        self._failed = failed
        #: Believes fronts that tell when they got a request; None: there are none.
        self.stamps: FrontStamps | None = None
        #: Servers that requests may be passed on to; None: there are none.
        self.elsewhere: Elsewhere | None = None

    @property
    def node(self) -> str:
        """Name of this server among others; empty where it knows of none."""
        return "" if self.elsewhere is None else self.elsewhere.node

    def front_ns(self, headers: Headers, arrived_ns: int) -> int:
        """Return how long before `arrived_ns` a front got a call with these headers; 0: unknown."""
        if self.stamps is None:
            return 0
        # Not the clock of records, which keeps its distance while the system's is corrected.
        return self.stamps.front_ns(headers, wall_ns() - (now_ns() - arrived_ns))

    def submit(
        self,
        request: WireRequest,
        arrived_ns: int,
        remaining_s: float,
        caller: Principal,
        trace_parent: str,
        origin: Origin | None,
        cancellation: Cancellation,
    ) -> Submitted | bytes:
        """Submit a request, or return the answer of another server; see ``InferenceService``."""
        hops, front_ns, movable = 0, 0, False
        if origin is not None:
            hops, movable = origin.hops, self.elsewhere is not None and is_movable(request, origin)
            front_ns = self.front_ns(((ARRIVED, origin.stamp),), arrived_ns)
        submit = partial(
            self._submit, request, arrived_ns, remaining_s, caller, trace_parent, hops, front_ns
        )
        try:
            return submit(movable=movable)
        except BetterElsewhere as found:
            assert self.elsewhere is not None
            assert origin is not None
            left_s = remaining_s - (now_ns() - arrived_ns) / 1e9
            passed = self.elsewhere.answer(request, origin, found.task, left_s, cancellation)
            return submit(movable=False) if passed is None else passed

    def _submit(
        self, request: WireRequest, arrived_ns: int, remaining_s: float, caller: Principal,
        trace_parent: str, hops: int, front_ns: int, *, movable: bool,
    ) -> Submitted:  # fmt: skip
        """Check the request and submit it; a refusal gets its row in the report.

        Raises BetterElsewhere for a movable one, which then has none.
        """
        model = None
        try:
            while True:
                model = self._engine.model(request.model, request.version, request.request_id)
                call = decode_call(request, model, self._regions, arrived_ns, remaining_s, caller)
                if trace_parent or hops or front_ns or movable:
                    call = replace(
                        call, trace_parent=trace_parent, hops=hops, front_ns=front_ns,
                        movable=movable,
                    )  # fmt: skip
                try:
                    return model, call, self._engine.submit(call)
                except VersionReplaced:
                    continue  # ends: each time another version was unloaded
        except ServeError as error:
            if movable and isinstance(error, UnknownName | NotReady):
                raise BetterElsewhere from error
            self._engine.refused(
                request.model, request.version, request.request_id, arrived_ns, error, trace_parent
            )
            if model is not None:
                self._failed(model.name, model.version, arrived_ns)
            raise
