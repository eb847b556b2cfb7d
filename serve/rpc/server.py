"""Life cycle of the gRPC server: bind, serve, drain.

Each request in flight has a thread, which is made on demand. See
`docs/adr/0001-threads-not-asyncio.md` for why.
"""

import logging
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from serve.access.callers import AUTHORIZATION, Callers
from serve.access.certificates import Certificates
from serve.access.front_stamps import FrontStamps
from serve.config import FrontKind, ServerConfig
from serve.config_cluster import host_port
from serve.errors import ConfigError, NotReady
from serve.native import front_lacks, tls_lacks
from serve.obs.record import ServerRun
from serve.pb import POOL
from serve.pb import gnnserve_pb2 as _gnnserve_pb2  # noqa: F401  registers the service
from serve.rpc import gnnserve_service as own
from serve.rpc import service
from serve.rpc.admin_socket import AdminSocket
from serve.rpc.call_threads import CallThreads
from serve.rpc.elsewhere import Elsewhere
from serve.rpc.front_calls import FrontCalls
from serve.rpc.gate import Gate
from serve.rpc.guard import Guard
from serve.rpc.handlers import service_handler
from serve.rpc.health import Health
from serve.rpc.native_front import FrontLimits, NativeFront
from serve.rpc.open_calls import OpenCallLimit, limited, watched
from serve.rpc.plain_calls import PlainCalls
from serve.rpc.private_socket import PrivateSocket
from serve.rpc.refusals import Refusals
from serve.rpc.thread_pools import (
    HEALTH,
    MAX_JOB_WATCHERS,
    MAX_REFLECTIONS,
    MAX_STREAMS,
    MAX_WATCHERS,
    ThreadPools,
)
from serve.rpc.tls import server_credentials
from serve.rpc.watchdog import Watchdog
from serve.server.api import Inference
from serve.server.clock import now_ns
from serve.server.learning.alone import Arrays, Send
from serve.server.plain_requests import PlainRequests
from serve.server.regions import Regions
from serve.wire.messages import INFER_METHOD, encode_request

#: Time between the last answer and the closing of the connections, during which new requests are
#: refused. Clients that were just answered ask again at once, and gRPC ends calls that reach a
#: closing server with CANCELLED, which would hide the reason from them.
_REFUSE_S = 0.2
#: Time for the connections to close by themselves after that.
_CLOSE_S = 1.0
#: Time limit of one of the server's own requests.
_OWN_TIMEOUT_S = 30.0
#: How to get the native front's library.
_REMEDY = "install it with `apt install libnghttp2-14` or your system's package of that library"
_TLS_REMEDY = "install OpenSSL 3 with `apt install libssl3` or your system's package of it"
#: Loopback address of a server that listens on all interfaces.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}

_log = logging.getLogger(__name__)


class GrpcServer:
    """Serves an engine over gRPC, from ``start`` to ``stop``."""

    def __init__(
        self,
        engine: Inference,
        facts: Callable[[], ServerRun],
        report: own.ReportSource,
        config: ServerConfig,
        plain: PlainRequests | None = None,
        callers: Callers | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        """Make the services without listening yet.

        Args:
            engine: Answers requests. The server neither starts nor stops it.
            facts: Returns the description of this server; called for each answer that needs it.
            report: Makes the QoS report in its JSON shape over the last seconds given; 0: all.
            config: Address, limits and front end. `max_queue` sizes the thread pools too.
            plain: Takes the requests that a native front stages; None to stage none.
            callers: Finds whom calls come from; None to let everybody do everything.
            certificates: For encrypted connections; None for others.

        Raises ConfigError when `front` is `native` and libnghttp2 is missing.
        """
        native = _is_native(config.front, encrypted=certificates is not None)
        if not (native or config.on_loopback):
            _log.warning(
                "server.front: gRPC's own front end serves %s: it does not bound what a client "
                "costs before a call is complete, so one client can keep all others out. It is "
                "for networks that are trusted; the native front end bounds it",
                config.host,
            )
        self._host, self._port = config.host, config.grpc_port
        self._max_message_bytes = max_message_bytes = config.max_message_bytes
        self._callers = callers = callers or Callers()
        self._certificates = certificates
        #: Where this user's processes reach it without encryption, as gRPC writes it: an abstract
        #: Unix socket whose connections the native front looks at, or a private one.
        self._inside = f"unix-abstract:gnnserve-{secrets.token_hex(16)}"
        self._private: PrivateSocket | None = None
        self._gate = Gate()
        #: Requests that the server has sent itself.
        self.own_calls = 0
        self._refusals = Refusals()
        self._pools = ThreadPools(config.max_queue)
        self._threads = CallThreads(
            self._pools.ordinary,
            apart=self._pools.by_path(),
            receive_s=config.receive_timeout_s,
            refusals=self._refusals,
        )
        self._inference = service.InferenceService(
            engine,
            facts,
            self._gate,
            self._pools.streamed,
            OpenCallLimit(MAX_STREAMS, "streams", self._refusals),
            Regions(offered=config.offers_shared_memory),
        )
        self._front: NativeFront | None = None
        if native:
            calls = FrontCalls(
                self._inference,
                self._gate,
                self._pools.ordinary,
                self._refusals,
                callers,
                None if plain is None else PlainCalls(plain, engine.refused, self._inference),
            )
            self._front = NativeFront(
                calls,
                FrontLimits(
                    max_message_bytes,
                    config.max_receiving_bytes,
                    config.max_receiving_bytes_of_connection,
                    max_streams=self._pools.calls_of_a_connection,
                    max_connections=config.max_connections,
                    max_connections_of_peer=config.max_connections_of_peer,
                    receive_timeout_s=config.receive_timeout_s,
                ),
                certificates,
            )
        callers.on_change(lambda tenants: self._inference.stream_rights.look_again())
        self._health = Health(self._inference, engine.models, engine.served)
        self._watchdog = Watchdog()
        options = [
            *_options(max_message_bytes),
            ("grpc.max_concurrent_streams", self._pools.calls_of_a_connection),
        ]
        self._server = grpc.server(
            self._threads,  # type: ignore[arg-type]  # gRPC needs an Executor, no thread pool
            interceptors=self._guards(),
            options=options,
        )
        watches = OpenCallLimit(MAX_WATCHERS, "health watches", self._refusals)
        self._health.Watch = watched(limited(self._health.Watch, watches), self._pools.open)
        handlers = (
            service_handler(service.NAME, self._inference, service.AS_BYTES, self._refusals),
            service_handler(
                own.NAME,
                own.GnnServeService(
                    engine,
                    facts,
                    report,
                    max_message_bytes,
                    OpenCallLimit(MAX_JOB_WATCHERS, "watches of training jobs", self._refusals),
                    lambda: self._inference.submission.node,
                ),
                own.AS_BYTES,
                self._refusals,
            ),
        )
        self._server.add_generic_rpc_handlers(handlers)
        self._admin: AdminSocket | None = None
        if callers.limited:
            path = None if config.admin_socket is None else Path(config.admin_socket)
            self._admin = AdminSocket(path, self._threads, handlers, options, self._refusals)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, _Unregistered(self._server))
        self._enable_reflection()

    def _guards(self) -> list[grpc.ServerInterceptor]:
        if not self._callers.limited:
            return []
        files = None if self._certificates is None else self._certificates.files
        shown = files is not None and files.client_ca is not None and self._front is None
        return [Guard(self._callers, self._refusals, sees_names_late=shown)]

    @property
    def in_flight(self) -> int:
        """Number of accepted requests whose answers are not sent yet."""
        return self._gate.inside

    @property
    def draining(self) -> bool:
        """True once ``stop`` was called."""
        return self._gate.closed

    @property
    def answers(self) -> bool:
        """True while the port answers the server's own calls."""
        return self._watchdog.answers

    @property
    def refused(self) -> Mapping[str, int]:
        """Number of calls refused before they became requests, by reason."""
        counts = Counter(self._refusals.counts())
        if self._front is not None:
            counts.update(self._front.counts())
        return counts

    @property
    def ways(self) -> Mapping[str, int]:
        """Number of calls of the native front, by the way that they took; empty without it."""
        return {} if self._front is None else self._front.ways()

    @property
    def front(self) -> Literal["native", "python"]:
        """Front end that owns the port."""
        return "python" if self._front is None else "native"

    def start(self) -> int:
        """Listen and serve; returns the port. Raises ConfigError when it cannot be bound.

        A start that fails leaves no port, thread or file behind.
        """
        try:
            self._port = self._bind()
            self._pools.probes.start_kept()
            self._health.start()
            self._server.start()
            if self._admin is not None:
                self._admin.start(self._port)
            # Clients' own way, where it is open to one that has no certificate.
            encrypted = self._certificates is not None
            self._watchdog.start(self._inside if encrypted else self._open_address)
        except BaseException:
            self.stop(0.0)
            raise
        return self._port

    def pass_on(self, elsewhere: Elsewhere | None) -> None:
        """Pass on requests that had better be at another server, from now on; None: no others."""
        self._inference.submission.elsewhere = elsewhere

    def believe(self, stamps: FrontStamps) -> None:
        """Believe fronts that tell when they got a request, from now on."""
        self._inference.submission.stamps = stamps

    def accept(self, max_queue: int) -> None:
        """Have threads for another `max_queue` from now on."""
        self._pools.accept(max_queue)

    @contextmanager
    def own_requests(self) -> Iterator[Send]:
        """Yield a function that sends the server's own requests through its port.

        For use before clients are admitted. The function raises NotReady, with the status, when a
        request fails. Each call resets the statistics, so that own requests are not counted.
        """
        options = [*_options(self._max_message_bytes), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(self.own_address, options) as channel:
            metadata = ((AUTHORIZATION, f"Bearer {self._callers.own_token}"),)
            call: Callable[..., bytes] = channel.unary_unary(INFER_METHOD)

            def send(model: str, tensors: Arrays, request_id: str) -> None:
                message = encode_request(model, tensors, request_id=request_id)
                self.own_calls += 1
                try:
                    call(message, timeout=_OWN_TIMEOUT_S, metadata=metadata)
                except grpc.RpcError as error:
                    raise NotReady(f"{error.code().name}: {error.details()}") from error
                finally:
                    self._inference.forget()

            yield send

    def stop(self, grace_s: float) -> int:
        """Drain, then close; returns the number of requests that did not finish in time.

        The server is not ready at once: health says NOT_SERVING and new requests get UNAVAILABLE.
        Requests in flight have `grace_s` seconds to be answered. Health and metadata are served
        meanwhile. Idempotent.
        """
        deadline_ns = now_ns() + int(grace_s * 1e9)

        def remaining_s() -> float:
            return max(0.0, (deadline_ns - now_ns()) / 1e9)

        self._gate.close()
        self._health.refresh()
        left = self._gate.wait_empty(grace_s)
        if left:
            _log.warning("gave up on %d requests after %g s", left, grace_s)
        self._watchdog.stop()
        self._health.stop()
        threading.Event().wait(min(_REFUSE_S, remaining_s()))
        if self._front is not None:
            self._front.announce_end()
        if self._admin is not None:
            self._admin.stop(0.0)
        self._server.stop(min(_CLOSE_S, remaining_s())).wait()
        if self._front is not None:
            self._front.stop()
        if self._private is not None:
            self._private.close()
        self._threads.shutdown(wait=False)
        self._pools.streamed.shutdown()
        return left

    def _bind(self) -> int:
        try:
            if self._front is not None:
                self._server.add_insecure_port(self._front.make_backend())
                name = self._inside.removeprefix("unix-abstract:")
                return self._front.start(self._host, self._port, name)
            address = host_port(self._host, self._port)
            if self._certificates is None:
                return self._server.add_insecure_port(address)
            # gRPC does not tell whose process has connected, so the file system decides it.
            self._private = PrivateSocket()
            self._inside = self._private.address
            self._server.add_insecure_port(self._inside)
            return self._server.add_secure_port(address, server_credentials(self._certificates))
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"server.grpc_port: cannot listen on {self._host}:{self._port}: "
                f"{_bind_error(self._host, self._port) or error}"
            ) from error

    @property
    def own_address(self) -> str:
        """Address at which this user's processes reach the server unencrypted, as gRPC writes it.

        The native front bounds what a client resets and has in memory, but not there, where the
        calls of all HTTP clients come by one connection.
        """
        if self._certificates is not None or self._front is not None:
            return self._inside
        return self._open_address

    @property
    def _open_address(self) -> str:
        return host_port(_LOOPBACK.get(self._host, self._host), self._port)

    def _enable_reflection(self) -> None:
        """Offer reflection of all services, from our own descriptor pool."""
        for descriptor in (health_pb2.DESCRIPTOR, reflection._reflection_pb2.DESCRIPTOR):
            POOL.AddSerializedFile(descriptor.serialized_pb)
        names = (service.NAME, own.NAME, HEALTH, reflection.SERVICE_NAME)
        servicer = reflection.ReflectionServicer(names, pool=POOL)
        calls = OpenCallLimit(MAX_REFLECTIONS, "reflection calls", self._refusals)
        servicer.ServerReflectionInfo = limited(servicer.ServerReflectionInfo, calls)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            servicer, _Unregistered(self._server)
        )


class _Unregistered:
    """Registers a service's methods as generic ones, since gRPC hides the path of the others."""

    def __init__(self, server: grpc.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, *_: object) -> None:
        """Register nothing."""


def _is_native(front: FrontKind, *, encrypted: bool) -> bool:
    """Decide `auto`; raises ConfigError when `native` is asked for and cannot be had."""
    if front == "python":
        return False
    lacks, remedy = front_lacks(), _REMEDY
    if encrypted and not lacks and (lacks := tls_lacks()):
        remedy = _TLS_REMEDY
    if lacks and front == "native":
        raise ConfigError(f"server.front: 'native': {lacks}; {remedy}")
    if lacks:
        _log.info("the native front is off, and gRPC's own serves: %s; %s", lacks, remedy)
    return not lacks


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Two servers on one port would share its requests; the second one must fail instead.
        ("grpc.so_reuseport", 0),
        # By default gRPC cancels calls that wait for half a minute, and nobody hears of them.
        ("grpc.server_max_unrequested_time_in_server", 3600),
        # Clients may ping idle connections, and the server notices dead ones.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]


def _bind_error(host: str, port: int) -> str:
    """Return the reason why the system refuses to bind, empty when it no longer refuses."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""
