"""Every method of every service with every kind of credential, on both front ends."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.access.admin_path import find_socket
from serve.access.callers import Callers
from serve.access.principal import CLIENT_ROLES
from serve.access.rules import ROLES
from serve.access.tokens import Token, TokensFile, hash_of, read_tokens, write_tokens
from serve.access.watching import FileWatcher
from serve.config import ServerConfig
from serve.errors import ConfigError, InvalidInput, UnknownName
from serve.native import front_lacks
from serve.pb import POOL
from serve.rpc import gnnserve_service as own
from serve.rpc import service
from serve.rpc.server import GrpcServer
from serve.rpc.thread_pools import HEALTH
from serve.server.api import InferCall
from serve.server.regions import Regions
from serve.wire.messages import INFER_METHOD, STREAM_METHOD, decode_stream_answer, encode_request
from tests.access.support import CREDENTIALS, TENANT, TOKENS, callers_of, headers
from tests.rpc.fakes import FACTS, FEATURES, FakeEngine

OK, INVALID, NO_SUCH, ABSENT = "OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"
NOBODY, FORBIDDEN = "UNAUTHENTICATED", "PERMISSION_DENIED"

#: Who may call, of `infer`, `observe` and `admin` (on the admin socket, or allowed on the port).
FREE, INFER, OBSERVE, EITHER, ADMIN = "free", "infer", "observe", "infer observe", ""
#: By method: who may call it, and what an empty message gets.
STANDARD = {
    "ServerLive": (FREE, OK),
    "ServerReady": (FREE, OK),
    "ModelReady": (FREE, OK),
    "ServerMetadata": (EITHER, OK),
    "ModelMetadata": (EITHER, NO_SUCH),
    "ModelConfig": (EITHER, NO_SUCH),
    "ModelInfer": (INFER, NO_SUCH),
    "ModelStreamInfer": (INFER, OK),
    "ModelStatistics": (OBSERVE, OK),
    "RepositoryIndex": (OBSERVE, OK),
    "RepositoryModelLoad": (ADMIN, NO_SUCH),
    "RepositoryModelUnload": (ADMIN, NO_SUCH),
    "SystemSharedMemoryStatus": (INFER, OK),
    "SystemSharedMemoryRegister": (INFER, INVALID),
    "SystemSharedMemoryUnregister": (INFER, OK),
    "CudaSharedMemoryStatus": (INFER, ABSENT),
    "CudaSharedMemoryRegister": (INFER, ABSENT),
    "CudaSharedMemoryUnregister": (INFER, ABSENT),
    "TraceSetting": (ADMIN, ABSENT),
    "LogSettings": (ADMIN, ABSENT),
}
OWN = {
    "Describe": (EITHER, OK),
    "Estimate": (EITHER, NO_SUCH),
    "ListGraphs": (EITHER, OK),
    "UpdateGraph": (ADMIN, INVALID),
    "Report": (OBSERVE, OK),
    "ListVersions": (OBSERVE, OK),
    "ChangeVersions": (ADMIN, NO_SUCH),
    "SubmitJob": (ADMIN, NO_SUCH),
    "ListJobs": (ADMIN, OK),
    "WatchJob": (ADMIN, NO_SUCH),
    "CancelJob": (ADMIN, NO_SUCH),
}
PROBES = {"Check": (FREE, OK), "Watch": (FREE, OK)}
if "List" in health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name:
    PROBES["List"] = (EITHER, OK)
REFLECTION = {"ServerReflectionInfo": (EITHER, OK)}
CELLS = {
    f"/{name}/{method}": row
    for name, rows in (
        (service.NAME, STANDARD),
        (own.NAME, OWN),
        (HEALTH, PROBES),
        (reflection.SERVICE_NAME, REFLECTION),
    )
    for method, row in rows.items()
}
STREAMS = (STREAM_METHOD, f"/{reflection.SERVICE_NAME}/ServerReflectionInfo")


def descriptors():
    """Every method that the server offers."""
    services = [POOL.FindServiceByName(name) for name in (service.NAME, own.NAME)]
    services += [
        file.services_by_name[name]
        for file, name in (
            (health_pb2.DESCRIPTOR, "Health"),
            (reflection_pb2.DESCRIPTOR, "ServerReflection"),
        )
    ]
    return {f"/{one.full_name}/{method.name}" for one in services for method in one.methods}


def test_no_method_is_without_a_row():
    # Releases of the health protocol differ in `List`.
    newer = {f"/{HEALTH}/List"} - descriptors()
    assert descriptors() | newer == {method for method in ROLES if method.startswith("/")}
    assert descriptors() == set(CELLS)


class Graphless(FakeEngine):
    """An engine without resident graphs."""

    def graphs(self, name=""):
        return ()

    def update_graph(self, name, change, if_version):
        self.estimate_sample("", "", name, 0)

    def unload(self, name, cancellation=None):
        self.model(name)

    @property
    def training(self):
        return self

    def submit(self, call):
        return super().submit(call) if isinstance(call, InferCall) else self.model(call.model)

    def jobs(self):
        return ()

    def watch(self, job_id, seen=None):
        raise UnknownName(f"there is no job {job_id}")

    cancel = watch


def serving(callers, front="python", **options):
    config = ServerConfig(
        grpc_port=0,
        front=front,
        max_queue=16,
        shared_memory="on",
        admin_socket=options.pop("admin"),
    )
    server = GrpcServer(Graphless(), lambda: FACTS, lambda _: {}, config, callers=callers)
    server.port = server.start()
    return server


@pytest.fixture(scope="module", params=["python", "native"])
def guarded(request, tmp_path_factory):
    """A server of each front end that wants credentials; administrators use the admin socket."""
    if request.param == "native" and (lacks := front_lacks()):
        pytest.skip(lacks)
    folder = tmp_path_factory.mktemp("guarded")
    server = serving(callers_of(folder), request.param, admin=str(folder / "admin.sock"))
    server.folder = folder
    yield server
    server.stop(2.0)


@pytest.fixture(scope="module")
def open_to_admins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("admins")
    server = serving(callers_of(folder, admin_on_port=True), admin=str(folder / "admin.sock"))
    yield server
    server.stop(2.0)


def status(channel, method, metadata=(), message=b""):
    """Return the name of the status that a call with this message gets."""
    try:
        if method in STREAMS:
            for _ in channel.stream_stream(method)(iter([]), timeout=PATIENCE_S, metadata=metadata):
                pass
        elif method.endswith("/Watch"):
            call = channel.unary_stream(method)(message, timeout=PATIENCE_S, metadata=metadata)
            next(call)
            call.cancel()
        else:
            channel.unary_unary(method)(message, timeout=PATIENCE_S, metadata=metadata)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def wanted(method, credential):
    """Return the status of an empty message on the port."""
    who, result = CELLS[method]
    if who == FREE:
        return result
    if credential in ("none", "wrong", "expired"):
        return NOBODY
    # On the port an administrator is a client and an observer.
    roles = {"admin": EITHER, "other tenant": INFER}.get(credential, credential).split()
    return result if set(roles) & set(who.split()) else FORBIDDEN


@pytest.mark.parametrize("method", CELLS)
@pytest.mark.parametrize("credential", CREDENTIALS)
def test_every_cell_has_its_code(guarded, method, credential):
    with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:
        assert status(channel, method, headers(credential)) == wanted(method, credential)


@pytest.mark.parametrize("method", CELLS)
def test_the_admin_socket_lets_its_user_do_everything(guarded, method):
    path = guarded.folder / "admin.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    if HEALTH in method or reflection.SERVICE_NAME in method:
        return
    with grpc.insecure_channel(f"unix:{path}") as channel:
        assert status(channel, method) == CELLS[method][1]


@pytest.mark.parametrize("method", [m for m in CELLS if CELLS[m][0] == ADMIN])
def test_tokens_of_administrators_on_the_port_where_allowed(open_to_admins, method):
    with grpc.insecure_channel(f"127.0.0.1:{open_to_admins.port}") as channel:
        assert status(channel, method, headers("admin")) == CELLS[method][1]
        assert status(channel, method, headers("infer")) == FORBIDDEN


def request(**parameters):
    tensors = {
        "x": np.zeros((3, FEATURES), np.float32),
        "edge_index": np.array([[0, 1], [1, 2]], np.int64),
    }
    return encode_request("gcn", tensors, parameters=parameters)


@pytest.mark.parametrize(
    ("credential", "parameters", "code"),
    [
        ("infer", {}, OK),
        ("infer", {"tenant": TENANT}, OK),
        ("other tenant", {"tenant": TENANT}, FORBIDDEN),
        ("infer", {"tenant": "guest"}, FORBIDDEN),
        ("infer", {"priority": 2, "qos_target_us": 500}, OK),
        ("infer", {"priority": 1}, FORBIDDEN),
        ("infer", {"qos_target_us": 499}, FORBIDDEN),
        ("other tenant", {"priority": 1, "qos_target_us": 1}, OK),
        ("observe", {}, FORBIDDEN),
        ("none", {}, NOBODY),
    ],
)
def test_a_tenants_requests(guarded, credential, parameters, code):
    engine = guarded._inference._engine
    engine.calls.clear()
    with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:
        assert status(channel, INFER_METHOD, headers(credential), request(**parameters)) == code
        if code == OK:
            (call,) = engine.calls
            assert call.tenant == (TENANT if credential == "infer" else "guest")
        else:
            assert engine.calls == []
        if credential in ("infer", "other tenant"):
            answers = channel.stream_stream(STREAM_METHOD)(
                iter([request(**parameters)]), metadata=headers(credential), timeout=PATIENCE_S
            )
            (answer,) = map(decode_stream_answer, answers)
            failed = getattr(answer, "parameters", {}).get("status")
            assert failed == (None if code == OK else FORBIDDEN)


def test_refusals_are_counted(guarded):
    before = dict(guarded.refused)
    with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:
        status(channel, INFER_METHOD, headers("wrong"), request())
        status(channel, f"/{own.NAME}/Report", headers("infer"))
    after = guarded.refused
    assert after["unauthenticated"] - before["unauthenticated"] == 1
    assert after["forbidden"] - before["forbidden"] == 1


def test_revoking_counts_under_load_and_renewing_loses_nothing(guarded, tmp_path):
    """Tokens come and go while another client asks without a pause; none of its calls fail."""
    path = guarded._callers._file
    content = read_tokens(path)
    watcher = FileWatcher(*guarded._callers.watched)
    watcher.start()
    codes = []
    try:
        with grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as channel:

            def ask(token):
                bearer = [("authorization", f"Bearer {token}")]
                return status(channel, INFER_METHOD, bearer, request())

            for turn in range(3):
                row = Token(principal="new", roles=("infer",), hash=hash_of(f"token {turn}"))
                write_tokens(path, TokensFile(token=(*content.token, row), tenant=content.tenant))

                def known(turn=turn):
                    codes.append(ask(TOKENS["infer"]))
                    return ask(f"token {turn}") == OK

                wait_for(known, f"token {turn}")
                if turn:
                    assert ask(f"token {turn - 1}") == NOBODY
    finally:
        write_tokens(path, content)
        watcher.stop()
    assert set(codes) == {OK}


def test_regions_are_their_owners(guarded):
    """Each principal has its own names; an administrator sees all of them."""
    name = f"gnnserve-test-{os.getpid()}"
    path = Path("/dev/shm") / name
    path.write_bytes(bytes(64))
    methods = {
        what: f"/{service.NAME}/SystemSharedMemory{what}"
        for what in ("Register", "Status", "Unregister")
    }
    messages = {
        what: POOL.FindMessageTypeByName(f"inference.SystemSharedMemory{what}Request")
        for what in methods
    }
    try:
        with (
            grpc.insecure_channel(f"127.0.0.1:{guarded.port}") as port,
            grpc.insecure_channel(f"unix:{guarded.folder / 'admin.sock'}") as admin,
        ):

            def call(channel, what, credential="none", **fields):
                message = message_factory.GetMessageClass(messages[what])(**fields)
                reply = message_factory.GetMessageClass(
                    POOL.FindMessageTypeByName(f"inference.SystemSharedMemory{what}Response")
                )
                return channel.unary_unary(
                    methods[what], type(message).SerializeToString, reply.FromString
                )(message, metadata=headers(credential), timeout=PATIENCE_S)

            region = {"name": "r", "key": f"/{name}", "byte_size": 64}
            call(port, "Register", "infer", **region)
            call(port, "Register", "other tenant", **region)
            assert set(call(port, "Status", "infer").regions) == {"r"}
            assert set(call(admin, "Status").regions) == {"app/r", "guest/r"}
            with pytest.raises(grpc.RpcError) as caught:
                call(port, "Status", "infer", name="guest/r")
            assert caught.value.code().name == NO_SUCH
            call(port, "Unregister", "infer")
            assert set(call(admin, "Status").regions) == {"guest/r"}
            call(port, "Unregister", "infer", name="guest/r")
            call(admin, "Unregister", name="guest/r")
            assert set(call(admin, "Status").regions) == set()
    finally:
        path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_memory_of_another_user_is_refused():
    path = Path("/dev/shm") / f"gnnserve-test-{os.getpid()}-foreign"
    path.write_bytes(bytes(64))
    try:
        os.chown(path, 12345, 12345)
        with pytest.raises(InvalidInput, match="another user"):
            Regions().register("r", path.name, 0, 64)
    finally:
        path.unlink()


def test_the_socket_is_found_by_the_port_and_gone_after_the_stop(monkeypatch, tmp_path):
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    server = serving(callers_of(tmp_path), admin=None)
    try:
        path = find_socket(server.port)
        assert path == server._admin.path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        server.stop(2.0)
    assert not path.exists()
    assert find_socket(server.port) is None


def test_a_socket_in_use_is_not_taken_and_one_left_behind_is(tmp_path):
    path = str(tmp_path / "admin.sock")
    first = serving(callers_of(tmp_path), admin=path)
    try:
        with pytest.raises(ConfigError, match="another server listens"):
            serving(callers_of(tmp_path), admin=path)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            assert status(channel, f"/{service.NAME}/ServerLive") == OK
    finally:
        first.stop(2.0)
    with suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    second = serving(callers_of(tmp_path), admin=path)
    second.stop(2.0)


def test_clients_without_credentials_are_no_administrators_beyond_the_host(tmp_path):
    server = serving(Callers(open_roles=CLIENT_ROLES), admin=str(tmp_path / "admin.sock"))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            assert status(channel, INFER_METHOD, (), request()) == OK
            assert status(channel, f"/{service.NAME}/RepositoryIndex") == OK
            assert status(channel, f"/{service.NAME}/RepositoryModelUnload") == FORBIDDEN
    finally:
        server.stop(2.0)


def test_the_servers_own_requests_need_no_token(guarded):
    with guarded.own_requests() as send:
        tensors = {
            "x": np.zeros((3, FEATURES), np.float32),
            "edge_index": np.array([[0, 1], [1, 2]], np.int64),
        }
        send("gcn", tensors, "own")
