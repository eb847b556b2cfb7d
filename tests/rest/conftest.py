"""A gateway process in front of a gRPC server whose engine is in memory."""

import http.client
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.kit.waiting import PATIENCE_S
from serve.access.certificates import CertificateFiles
from serve.access.settings import AccessSettings
from serve.config import ServerConfig
from serve.obs.http import HttpPort, listening_socket, private_socket
from serve.rest.process import GatewayProcess, missing_packages
from serve.rpc.server import GrpcServer
from tests.rpc.fakes import FACTS, FakeEngine, model_info

MOST_BYTES = 1 << 20


class Answer:
    """Status, headers (by lower-case name) and body of an answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body)


#: Of the main process.
METRICS = b"up 1\n"


class Gateway:
    """The processes of the tests, and what they need of each."""

    def __init__(
        self, stack: ExitStack, access: AccessSettings | None = None, folder: Path | None = None
    ) -> None:
        """With `access`, the server tells callers apart; its admin socket is in `folder`."""
        callers = None if access is None else access.callers()
        self.engine = FakeEngine()
        config = ServerConfig(
            grpc_port=0, max_message=f"{MOST_BYTES}", max_queue=600,
            admin_socket=None if folder is None else str(folder / "admin.sock"),
        )  # fmt: skip
        self.rpc = GrpcServer(self.engine, lambda: FACTS, lambda _: {}, config, callers=callers)
        self.grpc_port = self.rpc.start()
        stack.callback(self.stop_rpc)
        name, private = private_socket()
        self.metrics = METRICS
        backend = HttpPort(
            private,
            live=lambda: self.engine.live,
            ready=lambda: self.engine.ready,
            metrics=lambda _: self.metrics,
            database=self.database,
        )
        backend.start()
        stack.callback(backend.stop)
        listener = listening_socket("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.process = GatewayProcess(
            listener, name, max_message_bytes=MOST_BYTES, receive_timeout_s=self.receive_timeout_s,
            stop_s=PATIENCE_S, access=access, certificates=self.certificates,
            inside="" if callers is None else callers.inside, database=self.database,
        )  # fmt: skip
        self.process.start(self.rpc.own_address)
        stack.callback(self.process.stop)
        self.process.wait_serving(PATIENCE_S)

    receive_timeout_s = PATIENCE_S
    #: Of the report, and files of an encrypted port.
    database: Path | None = None
    certificates: CertificateFiles | None = None

    def stop_rpc(self) -> None:
        self.engine.let_go()
        self.rpc.stop(2.0)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """Send one request; `body` is JSON unless it is bytes, `headers` have _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: object = None, **headers: str) -> Answer:
        return self.ask("POST", path, body, **headers)


@pytest.fixture(scope="module")
def shared_gateway():
    if missing := missing_packages():
        pytest.skip(f"not installed: {', '.join(missing)}")
    with ExitStack() as stack:
        yield Gateway(stack)


@pytest.fixture
def gateway(shared_gateway):
    """The gateway, with the engine as it was."""
    yield shared_gateway
    engine = shared_gateway.engine
    engine.let_go()
    shared_gateway.metrics = METRICS
    engine.ready = engine.live = True
    engine.refuse_with = engine.fail_with = None
    engine.measured_bytes = 2048
    engine.calls.clear()
    engine.cancelled.clear()
    engine.infos = {"gcn": model_info(extra=("edge_weight", "batch")), "gin": model_info("gin")}


@pytest.fixture
def engine(gateway):
    return gateway.engine
