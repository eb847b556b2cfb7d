"""A load client in a process of its own: each request at its time, whatever the server does.

The same encoded requests (``loadgen.plan``) go to any server, over gRPC or as the body of a POST,
by ``loadgen``'s compiled sender. The Python client is there for questions about it, over gRPC only.
Latency counts from the *intended* send time. Answers are read when the run is over, so that this
takes nothing from the server's cores.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.kit.result import ROOT
from loadgen.measure import Sample
from loadgen.native import NativeSender

#: After this long without an answer a request counts as failed.
TIMEOUT_S = 20.0
#: Options of a gRPC channel or server: messages of any size.
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
#: Features of the demo models.
FEATURES = 32
CLIENTS = ("native", "python")


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A trace that was sent."""

    #: One for each item, in the trace's order.
    seen: tuple[Sample, ...]
    elapsed_s: float
    #: Processor time of the client.
    cpu_s: float


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """Requests that were kept in flight."""

    #: Of those answered, from sending.
    latencies_ns: tuple[int, ...]
    #: Late by the server's clock.
    late: int
    errors: tuple[str, ...]
    elapsed_s: float
    cpu_s: float


class LoadProcess:
    """Sends requests on demand; see `load_process`."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe

    def run(self, trace: Path, address: str) -> LoadRun:
        """Send the trace to `address`: HOST:PORT of a gRPC server, or a URL."""
        found = self._ask("send_trace", trace, address)
        assert isinstance(found, LoadRun)
        return found

    def keep_in_flight(
        self, messages: Sequence[bytes], in_flight: int, duration_s: float, address: str
    ) -> ClosedRun:
        """Keep requests in flight for a time, messages in turn (closed loop); native only."""
        found = self._ask("keep_in_flight", tuple(messages), in_flight, duration_s, address)
        assert isinstance(found, ClosedRun)
        return found

    def _ask(self, *what: object) -> object:
        self._pipe.send(what)
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found


@contextmanager
def load_process(client: str = "native") -> Iterator[LoadProcess]:
    """Yield a client process, and end it."""
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "bench.kit.load_client", client, str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        yield LoadProcess(ours)
    finally:
        ours.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask_once(address: str, message: bytes) -> tuple[bytes, str]:
    """Send one message; return the answer and an empty text, or nothing and the error.

    Raises NotReady when nobody takes a connection.
    """
    sender = NativeSender(address, TIMEOUT_S, whole_answers=True)
    sender.send_at([message], [0])
    (one,) = sender.take()
    reply = one.reply
    return one.answer, "" if reply.status == "OK" else f"{reply.status}: {reply.message}"


class Shapes:
    """The facts of a server that a plan of given requests needs: the shapes of inputs."""

    def lanes(self) -> int:
        raise AssertionError("a trace has its rate")

    def solo_s(self, model: str, num_nodes: int, num_edges: int) -> float:
        raise AssertionError("a trace has its rate")

    def lone_s(self, message: bytes) -> float:
        raise AssertionError("a trace has its rate")

    def models(self) -> tuple[str, ...]:
        raise AssertionError("a trace has its models")

    def inputs(self, model: str) -> dict[str, tuple[int, ...]]:
        return {"x": (-1, FEATURES), "edge_index": (2, -1)}
