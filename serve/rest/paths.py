"""The paths of the protocol beside inference, and what answers each."""

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request

from serve.obs.exposition import before, wanted_type
from serve.pb import grpc_service_pb2 as pb
from serve.rest.backend import PROBE_S, REPORT_S, Backend
from serve.rest.bodies import BodyReader
from serve.rest.counts import Counts
from serve.rest.errors import RestError, invalid
from serve.rest.inference import Parameters
from serve.rest.json_messages import plain
from serve.rest.replies import Handler, HttpReply, Path, as_json, model_of, unless_gone
from serve.rest.small_bodies import small_body
from serve.rest.version_paths import VersionPaths

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

_VARY = "Accept, Accept-Encoding"


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


class Paths:
    """Handlers for health, metadata, the repository, shared memory, metrics and the report."""

    def __init__(self, backend: Backend, bodies: BodyReader, tally: Counts) -> None:
        self._backend = backend
        self._bodies = bodies
        self._counts = tally

    def table(self) -> list[Path]:
        """Return all paths."""
        rows = [
            Path("GET", "/v2", self.server_metadata),
            Path("GET", "/v2/health/live", self.live),
            Path("GET", "/v2/health/ready", self.ready),
            Path("GET", "/v2/models", self.model_names),
            Path("GET", "/v2/models/stats", self.statistics),
            Path("POST", "/v2/repository/index", self.repository_index, IndexBody),
            Path("POST", "/v2/repository/models/{model}/load", self.load, ModelControlBody),
            Path("POST", "/v2/repository/models/{model}/unload", self.unload, ModelControlBody),
            *VersionPaths(self._backend, self._bodies).table(),
            Path("GET", "/v2/systemsharedmemory/status", self.regions),
            Path("POST", "/v2/systemsharedmemory/unregister", self.unregister),
            Path("GET", "/v2/systemsharedmemory/region/{region}/status", self.regions),
            Path(
                "POST", "/v2/systemsharedmemory/region/{region}/register", self.register, RegionBody
            ),
            Path("POST", "/v2/systemsharedmemory/region/{region}/unregister", self.unregister),
            Path("GET", "/metrics", self.metrics),
            Path("GET", "/report", self.report),
            Path("GET", "/report.json", self.report),
        ]
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            rows += [
                Path("GET", path, self.model_metadata),
                Path("GET", f"{path}/ready", self.model_ready),
                Path("GET", f"{path}/config", self.model_config),
                Path("GET", f"{path}/stats", self.statistics),
            ]
        for name, path in _NOT_OFFERED:
            rows += [Path(method, path, self._not_offered(name)) for method in ("GET", "POST")]
        return rows

    # -- health and metadata ------------------------------------------------------------------

    async def live(self, request: Request) -> HttpReply:
        """Tell whether the main process works."""
        return await self._health("live")

    async def ready(self, request: Request) -> HttpReply:
        """Tell whether the server takes requests."""
        return await self._health("ready")

    async def server_metadata(self, request: Request) -> HttpReply:
        """Return name, version and extensions of the server."""
        return await self._plain("ServerMetadata", pb.ServerMetadataRequest())

    async def model_names(self, request: Request) -> HttpReply:
        """List the names of the models that are ready."""
        wanted = pb.RepositoryIndexRequest(ready=True)
        index = await self._call("RepositoryIndex", wanted)
        return as_json({"models": sorted({model.name for model in index.models})})

    async def model_metadata(self, request: Request) -> HttpReply:
        """Return versions, inputs and outputs of a model."""
        name, version = model_of(request)
        wanted = pb.ModelMetadataRequest(name=name, version=version)
        return await self._plain("ModelMetadata", wanted)

    async def model_config(self, request: Request) -> HttpReply:
        """Return a model's configuration in Triton's form."""
        return as_json(plain(await self._backend.model_config(*model_of(request))))

    async def model_ready(self, request: Request) -> HttpReply:
        """Answer 200 while a model takes requests, 503 while it does not, 404 for an unknown.

        Whoever may not ask about models gets 503 for an unknown one, too.
        """
        name, version = model_of(request)
        wanted = pb.ModelReadyRequest(name=name, version=version)
        ready = (await self._call("ModelReady", wanted)).ready
        if not ready:
            same = pb.ModelMetadataRequest(name=name, version=version)
            try:
                await self._call("ModelMetadata", same)  # raises for one that does not exist
            except RestError as error:
                if error.status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                    raise
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return as_json({"name": name, "ready": ready}, status)

    async def statistics(self, request: Request) -> HttpReply:
        """Return counts and durations of one model, or of all."""
        name, version = model_of(request)
        wanted = pb.ModelStatisticsRequest(name=name, version=version)
        return await self._plain("ModelStatistics", wanted)

    # -- repository ---------------------------------------------------------------------------

    async def repository_index(self, request: Request) -> HttpReply:
        """List the versions of all models with their state."""
        body = await small_body(self._bodies, request, IndexBody)
        index = await self._call("RepositoryIndex", pb.RepositoryIndexRequest(ready=body.ready))
        return as_json([plain(model) for model in index.models])

    async def load(self, request: Request) -> HttpReply:
        """Load or reload a model; answers when it is ready."""
        return await self._control(request, "RepositoryModelLoad", pb.RepositoryModelLoadRequest)

    async def unload(self, request: Request) -> HttpReply:
        """Stop serving a model."""
        return await self._control(
            request, "RepositoryModelUnload", pb.RepositoryModelUnloadRequest
        )

    async def _control(self, request: Request, method: str, message: Any) -> HttpReply:
        body = await small_body(self._bodies, request, ModelControlBody)
        wanted = message(model_name=model_of(request)[0])
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
        return HttpReply(b"")

    # -- shared memory ------------------------------------------------------------------------

    async def regions(self, request: Request) -> HttpReply:
        """Describe one region of shared memory, or all."""
        name = request.path_params.get("region", "")
        wanted = pb.SystemSharedMemoryStatusRequest(name=name)
        found = await self._call("SystemSharedMemoryStatus", wanted)
        return as_json([plain(region) for region in found.regions.values()])

    async def register(self, request: Request) -> HttpReply:
        """Register a shared memory object of this host."""
        body = await small_body(self._bodies, request, RegionBody)
        if not 0 <= body.offset < 2**63 or not 0 <= body.byte_size < 2**63:
            raise invalid("offset and byte_size must lie in [0, 2^63)")
        wanted = pb.SystemSharedMemoryRegisterRequest(
            name=request.path_params["region"],
            key=body.key,
            offset=body.offset,
            byte_size=body.byte_size,
        )
        await self._call("SystemSharedMemoryRegister", wanted)
        return HttpReply(b"")

    async def unregister(self, request: Request) -> HttpReply:
        """Unregister a region, or all."""
        name = request.path_params.get("region", "")
        wanted = pb.SystemSharedMemoryUnregisterRequest(name=name)
        await self._call("SystemSharedMemoryUnregister", wanted)
        return HttpReply(b"")

    # -- the main process ---------------------------------------------------------------------

    async def metrics(self, request: Request) -> HttpReply:
        """Return the metrics of the main process, and the gateway's own."""
        accept = wanted_type(request.headers.get("accept"))
        found = await self._backend.fetch("/metrics", PROBE_S, accept)
        content = before(self._counts.text(found.content_type), found.body)
        return HttpReply(content, found.content_type, found.status, {"Vary": _VARY})

    async def report(self, request: Request) -> HttpReply:
        """Return the report of the requests so far."""
        path, query = request.scope["path"], request.scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        found = await unless_gone(request, self._backend.fetch(target, REPORT_S))
        if found.status != HTTPStatus.OK:
            raise RestError(found.status, found.body.decode(errors="replace").strip())
        return HttpReply(found.body, found.content_type, found.status)

    async def _health(self, what: str) -> HttpReply:
        found = await self._backend.fetch(f"/v2/health/{what}", PROBE_S)
        return as_json({what: found.status == HTTPStatus.OK}, found.status)

    def _not_offered(self, name: str) -> Handler:
        """Return a handler that answers as gRPC does for its method `name`."""
        message = getattr(pb, f"{name}Request")

        async def ask(request: Request) -> HttpReply:
            """Answer that this is not offered."""
            return await self._plain(name, message())

        return ask

    # -- helpers ------------------------------------------------------------------------------

    async def _call(self, method: str, message: Any) -> Any:
        return await self._backend.call(getattr(self._backend.standard, method), message, PROBE_S)

    async def _plain(self, method: str, message: Any) -> HttpReply:
        return as_json(plain(await self._call(method, message)))
