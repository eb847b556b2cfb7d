"""The Open Inference Protocol's service, with every method that is offered.

A request is decoded, validated (``convert``) and submitted to the engine; its thread waits for the
ticket and encodes the answer. Messages of ModelInfer and ModelStreamInfer are handled as bytes, see
``serve.wire.messages``. Methods that are missing here answer UNIMPLEMENTED (``handlers``).
"""

from collections.abc import Callable, Iterator, Sequence

import grpc

import serve
from serve.access.open_rights import OpenRights
from serve.access.principal import ANYBODY, Principal
from serve.errors import (
    InvalidInput,
    RequestCancelled,
    ServeError,
    UnknownName,
)
from serve.models.repository import version_order
from serve.obs.record import RequestRecord, ServerRun
from serve.obs.trace_ids import TRACE_PARENT, trace_parent_of
from serve.pb import grpc_service_pb2 as pb
from serve.rpc import describe
from serve.rpc.cancellation import Cancellation
from serve.rpc.convert import encode_answer, split_facts
from serve.rpc.elsewhere import Origin, origin_of
from serve.rpc.gate import Gate
from serve.rpc.guard import ADMIT, CALLER
from serve.rpc.joint_calls import MODELS, JointCalls
from serve.rpc.open_calls import OpenCallLimit
from serve.rpc.statistics import Statistics
from serve.rpc.stream import Stream
from serve.rpc.submission import Submission
from serve.rpc.workers import Workers
from serve.server.api import Inference, ModelInfo
from serve.server.clock import now_ns
from serve.server.load_turns import LoadCancellation
from serve.server.regions import Regions
from serve.wire.messages import WireRequest, decode_request

NAME = "inference.GRPCInferenceService"
#: Methods that take and return serialized messages.
AS_BYTES = ("ModelInfer", "ModelStreamInfer")


class InferenceService:
    """Implements `inference.GRPCInferenceService`; method names are the protocol's."""

    def __init__(
        self,
        engine: Inference,
        facts: Callable[[], ServerRun],
        gate: Gate,
        workers: Workers,
        streams: OpenCallLimit,
        regions: Regions,
    ) -> None:
        self._engine = engine
        self._regions = regions
        self._facts = facts
        self._gate = gate
        #: Threads for the requests of streams; each stream has two more of its own.
        self.stream_workers = workers
        self._streams = streams
        #: Of the streams that are open here.
        self.stream_rights = OpenRights()
        self._statistics = Statistics()
        #: Knows other servers.
        self.submission = Submission(engine, regions, self.failed)
        self._joint = JointCalls(engine, regions, self.succeeded, self.failed)

    # -- inference ----------------------------------------------------------------------------

    def ModelInfer(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer one request."""
        arrived_ns = now_ns()
        cancellation = Cancellation()

        def ended() -> None:
            self._gate.leave()
            cancellation.cancel()

        try:
            self._gate.enter()
            if not context.add_callback(ended):
                ended()
                raise RequestCancelled("the call ended before the server read it")
        except ServeError as error:
            self.not_read(arrived_ns, error)
            raise
        request, left_s = decode_request(message), context.time_remaining()
        trace, origin = _trace_parent(context), origin_of(message, _headers(context))
        return self.infer(request, arrived_ns, cancellation, left_s, CALLER.get(), trace, origin)

    def ModelStreamInfer(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Answer many requests, each when it finishes.

        Errors are sent as messages of the stream. With the metadata `triton_grpc_error: true` the
        first error ends the stream with its status instead.
        """
        rights, trace, headers = self.stream_rights, _trace_parent(context), _headers(context)

        def infer(
            request: WireRequest, message: bytes, arrived_ns: int, cancellation: Cancellation
        ) -> bytes:
            # What a front said of the stream is not of this request.
            left_s, origin = (
                context.time_remaining(),
                origin_of(message, headers)._replace(stamp=""),
            )
            return self.infer(
                request, arrived_ns, cancellation, left_s, opened.caller, trace, origin
            )

        stream = Stream(
            infer, self._gate, self.stream_workers, cancel=context.cancel, lost=self.not_read
        )
        if not self._streams.enter(context, stream):
            return
        context.add_callback(stream.close)
        opened = rights.add(stream, ADMIT.get(), stream.end)
        try:
            yield from stream.answers(messages, raise_errors=_wants_statuses(context))
        finally:
            rights.remove(stream)

    def infer(
        self,
        request: WireRequest,
        arrived_ns: int,
        cancellation: Cancellation,
        remaining_s: float,
        caller: Principal = ANYBODY,
        trace_parent: str = "",
        origin: Origin | None = None,
    ) -> bytes:
        """Run a request whose call is counted by the gate already, to its end.

        Args:
            request: Decoded request.
            arrived_ns: Time at which the message was complete.
            cancellation: Passes the call's cancellation on.
            remaining_s: Seconds until the call's deadline.
            caller: Whom the call comes from.
            trace_parent: The client's span, see ``trace_ids``; empty for none.
            origin: What may be passed on to another server; None to answer here.

        Returns `ModelInferResponse`, serialized. Raises ServeError.
        """
        if MODELS in request.parameters:
            joint = request, arrived_ns, cancellation, remaining_s, caller, trace_parent
            return self._joint.infer(*joint)
        asked = request, arrived_ns, remaining_s, caller, trace_parent
        found = self.submission.submit(*asked, origin, cancellation)
        if isinstance(found, bytes):
            return found
        model, call, ticket = found
        cancellation.submitted(ticket)
        try:
            result = ticket.result()
            place, facts = call.output_place, split_facts(call, result)
            answer = encode_answer(request.request_id, result, place, self.submission.node, facts)
        except Exception:
            self.failed(model.name, model.version, arrived_ns)
            raise
        finally:
            cancellation.finished()
        self.succeeded(result.record)
        if call.split is None and not call.is_part:
            self._engine.answered(call, result)
        return answer

    # -- health and metadata ------------------------------------------------------------------

    def ServerLive(self, _: pb.ServerLiveRequest, __: object) -> pb.ServerLiveResponse:
        """Tell whether the process works at all."""
        return pb.ServerLiveResponse(live=self._engine.live)

    def ServerReady(self, _: pb.ServerReadyRequest, __: object) -> pb.ServerReadyResponse:
        """Tell whether the server accepts requests now."""
        return pb.ServerReadyResponse(ready=self.ready)

    def ModelReady(self, request: pb.ModelReadyRequest, _: object) -> pb.ModelReadyResponse:
        """Tell whether a model accepts requests now; an unknown model does not."""
        return pb.ModelReadyResponse(ready=self.model_ready(request.name, request.version))

    def ServerMetadata(self, _: pb.ServerMetadataRequest, __: object) -> pb.ServerMetadataResponse:
        """Return name, version and the offered extensions."""
        return pb.ServerMetadataResponse(
            name="gnnserve",
            version=serve.__version__,
            extensions=describe.extensions(shared_memory=self._regions.offered),
        )

    def ModelMetadata(
        self, request: pb.ModelMetadataRequest, _: object
    ) -> pb.ModelMetadataResponse:
        """Return inputs, outputs and properties of one model."""
        model = self._engine.model(request.name, request.version)
        return describe.metadata(model, _served_versions(model, self._engine))

    def ModelConfig(self, request: pb.ModelConfigRequest, _: object) -> pb.ModelConfigResponse:
        """Return the model's facts as the configuration that load generators read."""
        model = self._engine.model(request.name, request.version)
        config = describe.config(model, _served_versions(model, self._engine), self._facts())
        return pb.ModelConfigResponse(config=config)

    def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, _: object
    ) -> pb.ModelStatisticsResponse:
        """Return counts and durations of one model, or of all loaded models."""
        if request.name:
            models: tuple[ModelInfo, ...] = (self._engine.model(request.name, request.version),)
        else:
            models = tuple(m for m in self._engine.models() if m.state == "READY")
        kind = "GPU" if describe.on_cuda(self._facts()) else "CPU"
        answer = pb.ModelStatisticsResponse()
        for model in models:
            found = self._statistics.message(model.name, model.version)
            found.memory_usage.add(type=kind, id=0, byte_size=model.weights_bytes)
            answer.model_stats.append(found)
        return answer

    # -- repository ---------------------------------------------------------------------------

    def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, _: object
    ) -> pb.RepositoryIndexResponse:
        """List every model and version, or only those that are ready."""
        _check_repository(request.repository_name)
        answer = pb.RepositoryIndexResponse()
        for model in self._engine.models():
            if model.state == "READY" or not request.ready:
                answer.models.add(
                    name=model.name,
                    version=model.version,
                    state=model.state,
                    reason=model.reason,
                )
        return answer

    def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: grpc.ServicerContext
    ) -> pb.RepositoryModelLoadResponse:
        """Load or reload a model from the repository; answers when it is ready.

        The load ends with its call.
        """
        _check_repository(request.repository_name)
        for name in request.parameters:
            raise InvalidInput(
                f"parameter '{name}': models are loaded as the repository holds them"
            )
        self._engine.load(request.model_name, _cancelled_with(context))
        return pb.RepositoryModelLoadResponse()

    def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: grpc.ServicerContext
    ) -> pb.RepositoryModelUnloadResponse:
        """Stop serving a model.

        Ignores `unload_dependents`, as no model depends on another.
        """
        _check_repository(request.repository_name)
        self._engine.unload(request.model_name, _cancelled_with(context))
        return pb.RepositoryModelUnloadResponse()

    # -- shared memory ------------------------------------------------------------------------

    def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, _: object
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Register a shared memory object of this host for the tensors of requests."""
        regions = _seen_by(CALLER.get(), self._regions)
        regions.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, _: object
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Describe one region, or all that are registered."""
        answer = pb.SystemSharedMemoryStatusResponse()
        regions = _seen_by(CALLER.get(), self._regions)
        for region in regions.registered(request.name):
            name = regions.name_of(region)
            status = answer.regions[name]
            status.name, status.key = name, region.key
            status.offset, status.byte_size = region.offset_bytes, region.size_bytes
        return answer

    def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, _: object
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Unregister a region, or all; requests in flight keep the memory that they use."""
        _seen_by(CALLER.get(), self._regions).unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    # -- shared with the server and the health service ----------------------------------------

    def succeeded(self, record: RequestRecord) -> None:
        """Count a request that is answered with a result."""
        self._statistics.succeeded(record)

    def failed(self, model: str, version: str, arrived_ns: int) -> None:
        """Count a request for a served model that ends in an error now."""
        self._statistics.failed(model, version, now_ns() - arrived_ns)

    def not_read(self, arrived_ns: int, error: ServeError) -> None:
        """Keep a record of a request that ended in `error` before its message was read."""
        self._engine.refused("unknown", "", "", arrived_ns, error)

    def forget(self) -> None:
        """Reset the statistics."""
        self._statistics = Statistics()

    @property
    def ready(self) -> bool:
        """True while the engine is ready and the server is not draining."""
        return self._engine.ready and not self._gate.closed

    @property
    def serving(self) -> bool:
        """True while models that have loaded take requests."""
        return self._engine.serving and not self._gate.closed

    def model_ready(self, name: str, version: str = "") -> bool:
        """Return True when the model serves, whatever the server's other models do."""
        if not self.serving:
            return False
        try:
            return self._engine.model(name, version).state == "READY"
        except ServeError:
            return False


def _seen_by(caller: Principal, regions: Regions) -> Regions:
    """Return the regions as the caller sees them."""
    return regions.of(caller.name, sees_all=caller.is_admin)


def _served_versions(model: ModelInfo, engine: Inference) -> list[str]:
    """Return all versions of a model that are being served, oldest first."""
    found = {m.version for m in engine.models() if m.name == model.name and m.state == "READY"}
    return sorted(found | {model.version}, key=version_order)


def _cancelled_with(context: grpc.ServicerContext) -> LoadCancellation:
    """Return what cancels a load or unload when its call ends."""
    cancellation = LoadCancellation()
    if not context.add_callback(cancellation.cancel):
        cancellation.cancel()
    return cancellation


def _headers(context: grpc.ServicerContext) -> Sequence[tuple[str, str | bytes]]:
    return context.invocation_metadata() or ()


def _trace_parent(context: grpc.ServicerContext) -> str:
    for name, value in _headers(context):
        if name == TRACE_PARENT:
            return trace_parent_of(str(value))
    return ""


def _check_repository(name: str) -> None:
    if name:
        raise UnknownName(f"repository '{name}': the only repository has no name")


def _wants_statuses(context: grpc.ServicerContext) -> bool:
    """Return True for a stream whose first error is to end it with its status."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get("triton_grpc_error", "")).lower() == "true"
