"""The paths of inference: the protocol's own, and TorchServe's."""

from http import HTTPStatus

from starlette.requests import Request

from serve.obs.trace_ids import TRACE_PARENT, trace_parent_of
from serve.pb import grpc_service_pb2 as pb
from serve.rest.backend import PROBE_S, Backend
from serve.rest.bodies import BodyReader
from serve.rest.deadline import HEADER as TIMEOUT_HEADER
from serve.rest.deadline import parse_timeout
from serve.rest.idle_threads import in_thread
from serve.rest.inference import HEADER_LENGTH, JsonRequest, read_request, write_answer
from serve.rest.predictions import is_plain, read_prediction, write_prediction
from serve.rest.replies import BINARY, REQUEST_ID, HttpReply, Path, model_of, unless_gone


class InferPaths:
    """Handlers of inference."""

    def __init__(self, backend: Backend, bodies: BodyReader, most_bytes: int) -> None:
        self._backend = backend
        self._bodies = bodies
        self._most_bytes = most_bytes

    def table(self) -> list[Path]:
        """Return all paths."""
        rows = [
            Path("POST", f"/v2/models/{{model}}{version}/infer", self.infer, JsonRequest)
            for version in ("", "/versions/{version}")
        ]
        for path in ("/predictions/{model}", "/predictions/{model}/{version}"):
            rows += [Path(method, path, self.predict, JsonRequest) for method in ("POST", "PUT")]
        return rows

    async def infer(self, request: Request) -> HttpReply:
        """Answer an inference request."""
        async with self._bodies.received(request) as body:
            return await self._infer(request, body)

    async def predict(self, request: Request) -> HttpReply:
        """Answer an inference request, or one that maps the names of inputs to nested lists."""
        async with self._bodies.received(request) as body:
            if not await in_thread(len(body), is_plain, body):
                return await self._infer(request, body)
            name, version = model_of(request)
            wanted = pb.ModelMetadataRequest(name=name, version=version)
            call = self._backend.call(self._backend.standard.ModelMetadata, wanted, PROBE_S)
            datatypes = {tensor.name: tensor.datatype for tensor in (await call).inputs}
            message = await in_thread(
                len(body),
                read_prediction,
                body,
                name,
                version,
                request.headers.get(REQUEST_ID, ""),
                datatypes,
                self._most_bytes,
            )
            response = await self._ask(request, message)
        return HttpReply(await in_thread(len(response), write_prediction, response))

    async def _infer(self, request: Request, body: memoryview) -> HttpReply:
        asked = await in_thread(
            len(body),
            read_request,
            body,
            request.headers.get(HEADER_LENGTH),
            *model_of(request),
            request.headers.get(REQUEST_ID, ""),
            self._most_bytes,
        )
        response = await self._ask(request, asked.message)
        answer = await in_thread(len(response), write_answer, response, asked.form)
        if answer.header_length is None:
            return HttpReply(answer.content)
        headers = {HEADER_LENGTH: str(answer.header_length)}
        return HttpReply(answer.content, BINARY, HTTPStatus.OK, headers)

    async def _ask(self, request: Request, message: bytes) -> bytes:
        limit_s = parse_timeout(request.headers.get(TIMEOUT_HEADER))
        trace_parent = trace_parent_of(request.headers.get(TRACE_PARENT, ""))
        return await unless_gone(request, self._backend.infer(message, limit_s, trace_parent))
