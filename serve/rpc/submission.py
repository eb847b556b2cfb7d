"""The way of one request into the engine."""

from collections.abc import Callable

from msgspec.structs import replace

from serve.access.principal import Principal
from serve.errors import NotReady, ServeError, UnknownName, VersionReplaced
from serve.rpc.convert import decode_call
from serve.server.api import BetterElsewhere, InferCall, Inference, ModelInfo, Ticket
from serve.server.regions import Regions
from serve.wire.messages import WireRequest


class Submission:
    """Submits requests to the engine; any thread may."""

    def __init__(
        self, engine: Inference, regions: Regions, failed: Callable[[str, str, int], None]
    ) -> None:
        """`failed` counts a request for a model that ends in an error; see ``InferenceService``."""
        self._engine = engine
        self._regions = regions
        self._failed = failed

    def submit(
        self, request: WireRequest, arrived_ns: int, remaining_s: float, caller: Principal,
        trace_parent: str, hops: int, *, movable: bool,
    ) -> tuple[ModelInfo, InferCall, Ticket]:  # fmt: skip
        """Check the request and submit it; a refusal gets its row in the report.

        Raises BetterElsewhere for a movable one, which then has none.
        """
        model = None
        try:
            while True:
                model = self._engine.model(request.model, request.version, request.request_id)
                call = decode_call(request, model, self._regions, arrived_ns, remaining_s, caller)
                if trace_parent or hops or movable:
                    call = replace(call, trace_parent=trace_parent, hops=hops, movable=movable)
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
