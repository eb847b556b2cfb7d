"""The gRPC port and the private HTTP port of the main process, as the gateway calls them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, NamedTuple

import grpc
import grpc.aio
import h11

from serve.obs.trace_ids import TRACE_PARENT
from serve.pb import gnnserve_pb2_grpc, grpc_service_pb2_grpc
from serve.pb import grpc_service_pb2 as pb
from serve.rest.errors import RestError, from_rpc
from serve.wire.messages import INFER_METHOD

#: Time for the main process to answer a probe, after which it counts as hung.
PROBE_S = 5.0
#: Time for a report of a large database.
REPORT_S = 120.0
_MOST_READ_BYTES = 1 << 18


#: Headers of gRPC that tell whom the request comes from that the current task answers.
CREDENTIALS: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("credentials", default=())


class Fetched(NamedTuple):
    """Answer of the main process to a GET request."""

    status: int
    content_type: str
    body: bytes


class Backend:
    """Calls the main process; to be made inside a running event loop."""

    def __init__(self, grpc_target: str, http_backend: str, max_message_bytes: int) -> None:
        self._http_backend = http_backend
        self._channel = grpc.aio.insecure_channel(
            grpc_target,
            [
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.enable_http_proxy", 0),
                # A request must not run twice.
                ("grpc.enable_retries", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )
        # Without serializers these carry bytes: see `serve.wire.messages`.
        self._infer: Any = self._channel.unary_unary(INFER_METHOD)
        #: Methods of the standard service; to be passed to `call`.
        self.standard: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        #: The same of gnnserve's own service.
        self.own: Any = gnnserve_pb2_grpc.GnnServeStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Close the gRPC connection; calls in flight fail."""
        await self._channel.close()

    async def infer(self, message: bytes, timeout_s: float | None, trace_parent: str = "") -> bytes:
        """Send a serialized request; return the serialized response. Raises RestError.

        `trace_parent` is the header of that name, empty for none.
        """
        more = ((TRACE_PARENT, trace_parent),) if trace_parent else ()
        response: bytes = await self.call(self._infer, message, timeout_s, more)
        return response

    async def call(
        self,
        method: Callable[..., Awaitable[Any]],
        message: object,
        timeout_s: float | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        """Call a method of gRPC; raises RestError."""
        try:
            return await method(
                message, timeout=timeout_s, metadata=(*CREDENTIALS.get(), *metadata)
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error

    async def model_config(self, name: str, version: str) -> Any:
        """Return a model's `ModelConfig`. Raises RestError."""
        wanted = pb.ModelConfigRequest(name=name, version=version)
        return (await self.call(self.standard.ModelConfig, wanted, PROBE_S)).config

    async def fetch(self, target: str, limit_s: float, accept: str = "*/*") -> Fetched:
        """GET `target` from the main process, which chooses the form by `accept`.

        Raises RestError when it does not answer.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self._fetch(target, accept)
        except TimeoutError:
            text = f"the server's main process did not answer within {limit_s:g} s"
        except (OSError, h11.ProtocolError) as error:
            text = f"the server's main process cannot be reached: {error}"
        raise RestError(HTTPStatus.SERVICE_UNAVAILABLE, text)

    async def _fetch(self, target: str, accept: str) -> Fetched:
        reader, writer = await asyncio.open_unix_connection(f"\0{self._http_backend}")
        try:
            protocol = h11.Connection(h11.CLIENT)
            headers = [("Host", "gnnserve"), ("Connection", "close"), ("Accept", accept)]
            asked = protocol.send(h11.Request(method="GET", target=target, headers=headers))
            writer.write((asked or b"") + (protocol.send(h11.EndOfMessage()) or b""))
            status, kind, body = 0, "", bytearray()
            while True:
                event = protocol.next_event()
                if event is h11.NEED_DATA:
                    protocol.receive_data(await reader.read(_MOST_READ_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                    kind = dict(event.headers).get(b"content-type", b"").decode("latin-1")
                elif isinstance(event, h11.Data):
                    body += event.data
                else:
                    return Fetched(status, kind, bytes(body))
        finally:
            writer.close()
