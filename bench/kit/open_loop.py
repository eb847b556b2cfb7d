"""An open-loop client in a process of its own: each request at its time, whatever the server does.

The same encoded requests (``loadgen.plan``) go to any server, over gRPC or as the body of a POST.
Latency counts from the *intended* send time. Answers stay bytes until the run is over, so that
decoding them takes nothing from the server's cores.
"""

import asyncio
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import grpc

from loadgen.options import LoadOptions
from loadgen.plan import make_plan
from serve.wire.messages import INFER_METHOD, decode_response

#: After this long without an answer a request counts as failed.
TIMEOUT_S = 20.0
#: Options of a gRPC channel or server: messages of any size.
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
#: Features of the demo models.
FEATURES = 32


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as the client saw it."""

    #: Answer − intended send time; actual − intended send time.
    latency_ns: int
    lag_ns: int
    #: The error, empty for a result.
    error: str
    #: The server's id of the request, where it gives one.
    request_uid: str


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A trace that was sent."""

    seen: tuple[Seen, ...]
    elapsed_s: float
    #: Processor time of the client.
    cpu_s: float


class Sender(Protocol):
    """Sends requests without waiting."""

    def send(self, message: bytes, done: Callable[[int, bytes, str], None]) -> None:
        """Send a message; call `done(when_ns, answer, error)` later, on any thread."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


class GrpcSender:
    """``ModelInfer`` of the Open Inference Protocol."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, UNLIMITED)
        grpc.channel_ready_future(self._channel).result(timeout=TIMEOUT_S)
        self._call: Any = self._channel.unary_unary(INFER_METHOD)

    def send(self, message: bytes, done: Callable[[int, bytes, str], None]) -> None:
        def ended(call: Any) -> None:
            now_ns = time.perf_counter_ns()
            if call.code() is grpc.StatusCode.OK:
                done(now_ns, call.result(), "")
            else:
                done(now_ns, b"", f"{call.code().name}: {call.details()}")

        self._call.future(message, timeout=TIMEOUT_S).add_done_callback(ended)

    def close(self) -> None:
        self._channel.close()


class HttpSender:
    """The same bytes as the body of a POST, over persistent connections."""

    def __init__(self, url: str) -> None:
        # Only the benches of other servers need it.
        import aiohttp

        self._url = url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def connect() -> aiohttp.ClientSession:
            return aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            )

        self._session = asyncio.run_coroutine_threadsafe(connect(), self._loop).result()

    def send(self, message: bytes, done: Callable[[int, bytes, str], None]) -> None:
        async def post() -> None:
            data, error = b"", ""
            try:
                async with self._session.post(self._url, data=message) as answer:
                    data = await answer.read()
                    error = "" if answer.status == 200 else f"HTTP {answer.status}"
            except Exception as failure:
                error = repr(failure)
            done(time.perf_counter_ns(), data, error)

        asyncio.run_coroutine_threadsafe(post(), self._loop)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LoadProcess:
    """Sends traces on demand; see `load_process`."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe

    def run(self, trace: Path, address: str) -> LoadRun:
        """Send the trace to `address`: HOST:PORT of a gRPC server, or a URL."""
        self._pipe.send((trace, address))
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, LoadRun)
        return found


@contextmanager
def load_process() -> Iterator[LoadProcess]:
    """Yield a client process, and end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield LoadProcess(ours)
    finally:
        ours.close()
        process.join(10)
        process.kill()


def _serve(pipe: "Connection[Any, Any]") -> None:
    messages: dict[Path, tuple[tuple[int, ...], tuple[bytes, ...]]] = {}
    while True:
        try:
            trace, address = pipe.recv()
        except EOFError:
            return
        try:
            if trace not in messages:
                plan = make_plan(LoadOptions(target=address, trace=trace), Shapes())
                messages[trace] = (tuple(i.offset_ns for i in plan.trace.items), plan.messages)
            pipe.send(_run(*messages[trace], address))
        except Exception as error:
            pipe.send(error)


def _run(offsets_ns: tuple[int, ...], messages: tuple[bytes, ...], address: str) -> LoadRun:
    sender = HttpSender(address) if address.startswith("http") else GrpcSender(address)
    ended: dict[int, tuple[int, bytes, str]] = {}
    all_ended = threading.Event()
    sent_ns: list[int] = []

    def done_with(index: int) -> Callable[[int, bytes, str], None]:
        def done(at_ns: int, answer: bytes, error: str) -> None:
            ended[index] = at_ns, answer, error
            if len(ended) == len(messages):
                all_ended.set()

        return done

    cpu_before_s = _cpu_s()
    started_ns = time.perf_counter_ns()
    for index, (offset_ns, message) in enumerate(zip(offsets_ns, messages, strict=True)):
        early_s = (started_ns + offset_ns - time.perf_counter_ns()) / 1e9
        if early_s > 0:
            time.sleep(early_s)
        sent_ns.append(time.perf_counter_ns())
        sender.send(message, done_with(index))
    all_ended.wait(2 * TIMEOUT_S)
    elapsed_s = (time.perf_counter_ns() - started_ns) / 1e9
    cpu_s = _cpu_s() - cpu_before_s
    sender.close()
    seen = []
    for index, offset_ns in enumerate(offsets_ns):
        at_ns, answer, error = ended[index]
        due_ns = started_ns + offset_ns
        uid = "" if error else _uid(answer)
        seen.append(Seen(at_ns - due_ns, sent_ns[index] - due_ns, error, uid))
    return LoadRun(tuple(seen), elapsed_s, cpu_s)


def _uid(answer: bytes) -> str:
    return str(decode_response(answer).parameters.get("request_uid", ""))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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
