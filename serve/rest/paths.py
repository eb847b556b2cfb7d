"""The paths of the protocol, and what answers each.

A handler returns a ``Reply`` or raises RestError; ``app`` makes responses of both.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from serve.pb import grpc_service_pb2 as pb
from serve.rest.backend import PROBE_S, REPORT_S, Backend
from serve.rest.bodies import BodyReader
from serve.rest.counts import Counts
from serve.rest.deadline import HEADER as TIMEOUT_HEADER
from serve.rest.deadline import parse_timeout
from serve.rest.errors import ClientGone, RestError, invalid
from serve.rest.inference import HEADER_LENGTH, Parameters, parse_json, read_request, write_answer
from serve.rest.plain import plain
from serve.rest.threads import in_thread

JSON = "application/json"
BINARY = "application/octet-stream"
#: Header with the id of a request whose body has none.
REQUEST_ID = "X-Request-Id"
#: Largest body of a request other than inference.
_SMALL_BODY_BYTES = 64 * 1024

#: Longest name of a model, version or region.
_MOST_NAME = 256
#: Paths of what the server does not offer, with the method of gRPC that says so.
_NOT_OFFERED = (
    *(("TraceSetting", f"{prefix}/trace/setting") for prefix in ("/v2", "/v2/models/{model}")),
    ("LogSettings", "/v2/logging"),
    ("CudaSharedMemoryStatus", "/v2/cudasharedmemory/status"),
    ("CudaSharedMemoryUnregister", "/v2/cudasharedmemory/unregister"),
    ("CudaSharedMemoryStatus", "/v2/cudasharedmemory/region/{region}/status"),
    ("CudaSharedMemoryRegister", "/v2/cudasharedmemory/region/{region}/register"),
    ("CudaSharedMemoryUnregister", "/v2/cudasharedmemory/region/{region}/unregister"),
)

_Result = TypeVar("_Result")


class Reply(NamedTuple):
    """Answer to a request."""

    content: bytes
    content_type: str = JSON
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = MappingProxyType({})


Handler = Callable[[Request], Awaitable[Reply]]


class IndexBody(msgspec.Struct):
    """Body of a request for the repository's index."""

    ready: bool = False


class ModelControlBody(msgspec.Struct):
    """Body of a request to load or unload a model."""

    parameters: Parameters = {}


class RegionBody(msgspec.Struct):
    """Body of a request to register a region of shared memory."""

    key: str
    byte_size: int
    offset: int = 0


def as_json(value: Any, status: int = HTTPStatus.OK) -> Reply:
    """Return a reply with `value` as JSON."""
    return Reply(msgspec.json.encode(value), status=status)


class Paths:
    """Handlers of all paths but those of the documentation."""

    def __init__(
        self, backend: Backend, bodies: BodyReader, tally: Counts, most_bytes: int
    ) -> None:
        self._backend = backend
        self._bodies = bodies
        self._counts = tally
        self._most_bytes = most_bytes

    def table(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each."""
        rows: list[tuple[str, str, Handler]] = [
            ("GET", "/v2", self.server_metadata),
            ("GET", "/v2/health/live", self.live),
            ("GET", "/v2/health/ready", self.ready),
            ("GET", "/v2/models", self.model_names),
            ("GET", "/v2/models/stats", self.statistics),
            ("POST", "/v2/repository/index", self.repository_index),
            ("POST", "/v2/repository/models/{model}/load", self.load),
            ("POST", "/v2/repository/models/{model}/unload", self.unload),
            ("GET", "/v2/systemsharedmemory/status", self.regions),
            ("POST", "/v2/systemsharedmemory/unregister", self.unregister),
            ("GET", "/v2/systemsharedmemory/region/{region}/status", self.regions),
            ("POST", "/v2/systemsharedmemory/region/{region}/register", self.register),
            ("POST", "/v2/systemsharedmemory/region/{region}/unregister", self.unregister),
            ("GET", "/metrics", self.metrics),
            ("GET", "/report", self.report),
            ("GET", "/report.json", self.report),
        ]
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            rows += [
                ("GET", path, self.model_metadata),
                ("GET", f"{path}/ready", self.model_ready),
                ("GET", f"{path}/config", self.model_config),
                ("GET", f"{path}/stats", self.statistics),
                ("POST", f"{path}/infer", self.infer),
            ]
        for name, path in _NOT_OFFERED:
            rows += [(method, path, self._not_offered(name)) for method in ("GET", "POST")]
        return rows

    # -- inference ----------------------------------------------------------------------------

    async def infer(self, request: Request) -> Reply:
        """Answer an inference request."""
        limit_s = parse_timeout(request.headers.get(TIMEOUT_HEADER))
        async with self._bodies.received(request) as body:
            asked = await in_thread(
                len(body),
                read_request,
                body,
                request.headers.get(HEADER_LENGTH),
                *_model(request),
                request.headers.get(REQUEST_ID, ""),
                self._most_bytes,
            )
            call = self._backend.infer(asked.message, limit_s)
            response = await unless_gone(request, call)
        answer = await in_thread(len(response), write_answer, response, asked.form)
        if answer.header_length is None:
            return Reply(answer.content)
        return Reply(answer.content, BINARY, headers={HEADER_LENGTH: str(answer.header_length)})

    # -- health and metadata ------------------------------------------------------------------

    async def live(self, request: Request) -> Reply:
        """Tell whether the main process works."""
        return await self._health("live")

    async def ready(self, request: Request) -> Reply:
        """Tell whether the server takes requests."""
        return await self._health("ready")

    async def server_metadata(self, request: Request) -> Reply:
        """Return name, version and extensions of the server."""
        return await self._plain("ServerMetadata", pb.ServerMetadataRequest())

    async def model_names(self, request: Request) -> Reply:
        """List the names of the models that are ready."""
        wanted = pb.RepositoryIndexRequest(ready=True)
        index = await self._call("RepositoryIndex", wanted)
        return as_json({"models": sorted({model.name for model in index.models})})

    async def model_metadata(self, request: Request) -> Reply:
        """Return versions, inputs and outputs of a model."""
        name, version = _model(request)
        wanted = pb.ModelMetadataRequest(name=name, version=version)
        return await self._plain("ModelMetadata", wanted)

    async def model_config(self, request: Request) -> Reply:
        """Return a model's configuration in Triton's form."""
        return as_json(plain(await self._backend.model_config(*_model(request))))

    async def model_ready(self, request: Request) -> Reply:
        """Answer 200 while a model takes requests, 503 while it does not, 404 for an unknown."""
        name, version = _model(request)
        wanted = pb.ModelReadyRequest(name=name, version=version)
        ready = (await self._call("ModelReady", wanted)).ready
        if not ready:
            # Raises for a model that does not exist.
            await self._call("ModelMetadata", pb.ModelMetadataRequest(name=name, version=version))
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return as_json({"name": name, "ready": ready}, status)

    async def statistics(self, request: Request) -> Reply:
        """Return counts and durations of one model, or of all."""
        name, version = _model(request)
        wanted = pb.ModelStatisticsRequest(name=name, version=version)
        return await self._plain("ModelStatistics", wanted)

    # -- repository ---------------------------------------------------------------------------

    async def repository_index(self, request: Request) -> Reply:
        """List the versions of all models with their state."""
        body = await self._small_body(request, IndexBody)
        index = await self._call("RepositoryIndex", pb.RepositoryIndexRequest(ready=body.ready))
        return as_json([plain(model) for model in index.models])

    async def load(self, request: Request) -> Reply:
        """Load or reload a model; answers when it is ready."""
        return await self._control(request, "RepositoryModelLoad", pb.RepositoryModelLoadRequest)

    async def unload(self, request: Request) -> Reply:
        """Stop serving a model."""
        return await self._control(
            request, "RepositoryModelUnload", pb.RepositoryModelUnloadRequest
        )

    async def _control(self, request: Request, method: str, message: Any) -> Reply:
        body = await self._small_body(request, ModelControlBody)
        wanted = message(model_name=_model(request)[0])
        for name, value in body.parameters.items():
            parameter = wanted.parameters[name]
            if isinstance(value, bool):
                parameter.bool_param = value
            elif isinstance(value, str):
                parameter.string_param = value
            elif isinstance(value, int) and -(2**63) <= value < 2**63:
                parameter.int64_param = value
            else:
                raise invalid(f"parameter '{name}': it is neither a text, a truth nor an integer")
        call = self._backend.call(getattr(self._backend.standard, method), wanted)
        await unless_gone(request, call)
        return Reply(b"")

    # -- shared memory ------------------------------------------------------------------------

    async def regions(self, request: Request) -> Reply:
        """Describe one region of shared memory, or all."""
        name = request.path_params.get("region", "")
        wanted = pb.SystemSharedMemoryStatusRequest(name=name)
        found = await self._call("SystemSharedMemoryStatus", wanted)
        return as_json([plain(region) for region in found.regions.values()])

    async def register(self, request: Request) -> Reply:
        """Register a shared memory object of this host."""
        body = await self._small_body(request, RegionBody)
        if not 0 <= body.offset < 2**63 or not 0 <= body.byte_size < 2**63:
            raise invalid("offset and byte_size must lie in [0, 2^63)")
        wanted = pb.SystemSharedMemoryRegisterRequest(
            name=request.path_params["region"],
            key=body.key,
            offset=body.offset,
            byte_size=body.byte_size,
        )
        await self._call("SystemSharedMemoryRegister", wanted)
        return Reply(b"")

    async def unregister(self, request: Request) -> Reply:
        """Unregister a region, or all."""
        name = request.path_params.get("region", "")
        wanted = pb.SystemSharedMemoryUnregisterRequest(name=name)
        await self._call("SystemSharedMemoryUnregister", wanted)
        return Reply(b"")

    # -- the main process ---------------------------------------------------------------------

    async def metrics(self, request: Request) -> Reply:
        """Return the metrics of the main process, and the gateway's own."""
        found = await self._backend.fetch("/metrics", PROBE_S)
        return Reply(found.body + self._counts.text(), found.content_type, found.status)

    async def report(self, request: Request) -> Reply:
        """Return the report as the main process makes it."""
        path, query = request.url.path, request.url.query
        target = f"{path}?{query}" if query else path
        found = await unless_gone(request, self._backend.fetch(target, REPORT_S))
        if found.status != HTTPStatus.OK:
            raise RestError(found.status, found.body.decode(errors="replace").strip())
        return Reply(found.body, found.content_type, found.status)

    async def _health(self, what: str) -> Reply:
        found = await self._backend.fetch(f"/v2/health/{what}", PROBE_S)
        return as_json({what: found.status == HTTPStatus.OK}, found.status)

    def _not_offered(self, name: str) -> Handler:
        """Return a handler that answers as gRPC does for its method `name`."""
        message = getattr(pb, f"{name}Request")

        async def ask(request: Request) -> Reply:
            return await self._plain(name, message())

        return ask

    # -- helpers ------------------------------------------------------------------------------

    async def _call(self, method: str, message: Any) -> Any:
        return await self._backend.call(getattr(self._backend.standard, method), message, PROBE_S)

    async def _plain(self, method: str, message: Any) -> Reply:
        return as_json(plain(await self._call(method, message)))

    async def _small_body(self, request: Request, kind: type[_Result]) -> _Result:
        """Decode a small body; an empty one is an empty object."""
        async with self._bodies.received(request) as body:
            if len(body) > _SMALL_BODY_BYTES:
                raise RestError(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"body: {len(body)} bytes, at most {_SMALL_BODY_BYTES} are taken here",
                )
            decoder = msgspec.json.Decoder(kind)
            found: _Result = parse_json(decoder, bytes(body).strip() or b"{}")
            return found


def _model(request: Request) -> tuple[str, str]:
    """Return the name and version in the path; empty for what is not there. Raises RestError."""
    for what, name in request.path_params.items():
        if len(name) > _MOST_NAME:
            raise RestError(
                HTTPStatus.NOT_FOUND,
                f"name of the {what}: {len(name)} characters, at most {_MOST_NAME} are taken",
            )
    return request.path_params.get("model", ""), request.path_params.get("version", "")


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what `work` returns; cancels it and raises ClientGone when the client disconnects.

    The body of `request` must have been read.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
