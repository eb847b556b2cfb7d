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
        front_ns, movable = 0, False
        if origin is None:
            origin = Origin(b"")
        else:
            movable = self.elsewhere is not None and is_movable(request, origin)
            front_ns = self.front_ns(((ARRIVED, origin.stamp),), arrived_ns)
        submit = partial(
            self._submit, request, arrived_ns, remaining_s, caller, trace_parent, origin, front_ns,
            cancellation,
        )  # fmt: skip
        try:
            return submit(movable=movable)
        except BetterElsewhere as found:
            assert self.elsewhere is not None
            left_s = remaining_s - (now_ns() - arrived_ns) / 1e9
            passed = self.elsewhere.answer(request, origin, found.task, left_s, cancellation)
            return submit(movable=False) if passed is None else passed

    def _submit(
        self, request: WireRequest, arrived_ns: int, remaining_s: float, caller: Principal,
        trace_parent: str, origin: Origin, front_ns: int, cancellation: Cancellation, *,
        movable: bool,
    ) -> Submitted | bytes:  # fmt: skip
        """Check the request and submit it, or parts of it; a refusal gets its row in the report.

        Returns the answer of a server where all of its nodes live. Raises BetterElsewhere for a
        movable one, which then has none.
        """
        model = None
        is_part = origin.part_target_ns > 0 and self.elsewhere is not None
        try:
            while True:
                model = self._engine.model(request.model, request.version, request.request_id)
                call = decode_call(request, model, self._regions, arrived_ns, remaining_s, caller)
                if trace_parent or origin.hops or front_ns or movable:
                    call = replace(
                        call, trace_parent=trace_parent, hops=origin.hops, front_ns=front_ns,
                        movable=movable,
                    )  # fmt: skip
                if is_part:
                    call = _as_part(call, origin.part_target_ns, caller)
                try:
                    if call.by_home and movable:
                        left_s = remaining_s - (now_ns() - arrived_ns) / 1e9
                        found = self._split(request, call, model, origin, left_s, cancellation)
                        if isinstance(found, bytes):
                            return found
                        call = found
                    return model, call, self._submitted(call)
                except VersionReplaced:
                    continue  # ends: each time another version was unloaded
        except ServeError as error:
            if movable and isinstance(error, UnknownName | NotReady):
                raise BetterElsewhere from error
            if not is_part:  # the server of the whole keeps its record
                self._engine.refused(
                    request.model, request.version, request.request_id, arrived_ns, error,
                    trace_parent,
                )  # fmt: skip
            if model is not None:
                self._failed(model.name, model.version, arrived_ns)
            raise

    def _split(
        self, request: WireRequest, call: InferCall, model: ModelInfo, origin: Origin,
        left_s: float, cancellation: Cancellation,
    ) -> InferCall | bytes:  # fmt: skip
        """Return the call for what is answered here, or the answer; see ``Elsewhere.split``."""
        assert self.elsewhere is not None
        homes = self._engine.moving.homes(call)
        if homes is None:
            return call
        found = self.elsewhere.split(request, call, model, origin, homes, left_s, cancellation)
        return call if found is None else found

    def _submitted(self, call: InferCall) -> Ticket:
        """Submit what is answered here; where it is refused, no other server goes on with it."""
        try:
            return self._engine.submit(call)
        except BaseException:
            if call.split is not None:
                call.split.others.end()
            raise


def _as_part(call: InferCall, target_ns: int, caller: Principal) -> InferCall:
    """Return a part of a request that another server has split, with the target of the whole."""
    least_us = None if caller.tenant is None else caller.tenant.min_qos_target_us
    return replace(call, is_part=True, qos_target_ns=max(target_ns, 1000 * (least_us or 0)))
