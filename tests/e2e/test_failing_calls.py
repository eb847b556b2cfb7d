"""Calls of the system that fail in the server, one at a time, wherever it makes them.

Each case has the n-th call of a kind fail while the server is asked, loads a model and restarts a
lane; where forks fail, also its gateway and its fork server. Whatever fails then, no answer is
wrong, and the server is as before soon after. Where memory fails within malloc it may also end,
with all that it started: gRPC's library ends a process then. No access to memory may end it. The
first call of each kind is tried; FAIL_CALLS=all tries every n, but of malloc 200, and FAIL_CALLS=20
so many of each kind.
"""

import mmap
import os
import signal
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from bench.kit.servers import ROOT, ServerProcess
from tests.e2e.support import GOOD, assert_equal, infer, raw_channel
from tests.processes import PATIENCE_S, descendants, http_get, metric, wait_for

SOURCE = ROOT / "csrc" / "tests" / "fail_calls_preload.cpp"
LANES = 2
#: Kinds of calls, in the order of the library's.
KINDS = ("thread", "open", "descriptor", "memory", "send", "fork", "heap")
MOST_OF_HEAP = 200
#: Time for a server to end that has begun to, and refuses calls; it may write its memory to a file.
END_S = 30.0
#: Exit codes of ends that nobody meant.
CRASHES = (-signal.SIGSEGV, -signal.SIGBUS)
_ROW = struct.Struct("=3Q")


class FailingCalls:
    """The file by which the library is told which call is to fail."""

    def __init__(self, folder) -> None:
        self.path = folder / "calls"
        self.path.write_bytes(bytes(_ROW.size * len(KINDS)))
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def _at(self, kind: str) -> int:
        return _ROW.size * KINDS.index(kind)

    def calls(self, kind: str) -> int:
        """Calls so far."""
        return _ROW.unpack_from(self._map, self._at(kind))[0]

    def failed(self, kind: str) -> int:
        """Calls that were made to fail."""
        return _ROW.unpack_from(self._map, self._at(kind))[2]

    def fail(self, kind: str, number: int) -> None:
        """Fail the call of that number from now on, from 1."""
        struct.pack_into("=Q", self._map, self._at(kind) + 8, self.calls(kind) + number)

    def end(self) -> None:
        """Fail no call any more."""
        for kind in KINDS:
            struct.pack_into("=Q", self._map, self._at(kind) + 8, 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    found = tmp_path_factory.mktemp("library") / "libfail_calls.so"
    command = ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", SOURCE, "-o", found, "-ldl"]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return found


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    return FailingCalls(tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="module")
def short(tmp_path_factory, library, failing):
    """A server that is short of something now and then."""
    environment = {"LD_PRELOAD": str(library), "GNNSERVE_FAIL_CALLS": str(failing.path)}
    sections = {"device": {"lanes": LANES}}
    folder = tmp_path_factory.mktemp("short")
    with ServerProcess(folder, sections=sections, environment=environment) as found:
        yield found
        failing.end()


def lanes_of(server) -> set[int]:
    """Children of the fork server."""
    return {pid for child in descendants(server.pid) for pid in descendants(child)}


def end_what_is_forked(server) -> None:
    """Kill the gateway and the fork server, which its lanes follow."""
    for child, words in descendants(server.pid).items():
        if "serve.rest.run" in words or "forkserver" in words:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def soon_ended(server) -> bool:
    """Return True when the server ends by itself, as one may that refuses calls by now."""
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(END_S)
        return True
    return False


def assert_nobody_left(failing) -> None:
    """No process is left that a server which ended had started."""
    mark = str(failing.path).encode()

    def marked(process) -> bool:
        with suppress(OSError):
            return mark in (process / "environ").read_bytes()
        return False

    processes = list(Path("/proc").glob("[0-9]*"))
    wait_for(lambda: not any(map(marked, processes)), "the end of all that it started")


def some_work(server, kind: str, expected) -> None:
    """Ask on new connections and old ones, load and unload a model, and end a lane."""
    refused = (grpc.RpcError, InferenceServerException, OSError)
    if kind == "fork":
        end_what_is_forked(server)
    for _ in range(2):
        with suppress(*refused), raw_channel(server) as call, ThreadPoolExecutor(8) as threads:
            for asked in [threads.submit(infer, call, "gcn", GOOD) for _ in range(16)]:
                with suppress(*refused):
                    assert_equal(asked.result().outputs["output"], expected)
    for path in ("/v2/health/ready", "/metrics"):
        http_get(server, path)
    with (
        suppress(*refused),
        tritonclient.grpc.InferenceServerClient(server.target) as client,
    ):
        for step in (client.unload_model, client.load_model):
            with suppress(*refused):
                step("sage", client_timeout=PATIENCE_S)
    if lanes := lanes_of(server):
        with suppress(ProcessLookupError):
            os.kill(min(lanes), signal.SIGKILL)


def tells(server, name: str, wanted: float) -> bool:
    """Return True when the metric has that value; a busy server may tell nothing at times."""
    with suppress(AssertionError):
        return metric(server, name) == wanted
    return False


def assert_as_before(server, expected) -> None:
    """All lanes are up, nothing is reserved, and models answer rightly."""

    def answers() -> bool:
        assert server.process.poll() is None, server.log.read_text()[-4000:]
        with suppress(grpc.RpcError), raw_channel(server) as call:
            assert_equal(infer(call, "gcn", GOOD).outputs["output"], expected)
            return True
        return False

    wait_for(answers, "an answer")
    wait_for(lambda: http_get(server, "/v2/health/ready")[0] == 200, "a server that is ready")
    wait_for(lambda: tells(server, "gnnserve_lanes_up", LANES), "all lanes")
    wait_for(lambda: tells(server, "gnnserve_memory_reserved_bytes", 0), "an empty ledger")
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        client.load_model("sage", client_timeout=PATIENCE_S)
    with raw_channel(server) as call:
        infer(call, "sage", GOOD)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_as_before_after_any_call_has_failed(short, failing, reference, kind):
    expected = reference("gcn", GOOD)
    before = failing.calls(kind)
    some_work(short, kind, expected)
    assert_as_before(short, expected)
    made = failing.calls(kind) - before
    assert made, "no such call is made"
    asked = os.environ.get("FAIL_CALLS", "")
    all_of_it = min(made, MOST_OF_HEAP) if kind == "heap" else made
    most = all_of_it if asked == "all" else min(int(asked or 1), made)
    for number in sorted({1 + at * made // most for at in range(most)}):
        failing.fail(kind, number)
        some_work(short, kind, expected)
        failing.end()
        try:
            assert_as_before(short, expected)
        except Exception:
            if kind != "heap" or not soon_ended(short):
                raise
            assert short.process.returncode not in CRASHES, short.log.read_text()[-4000:]
            assert_nobody_left(failing)
            short.start()
            short.wait_ready()
    assert failing.failed(kind), "none failed"
