"""The sender in compiled code: one thread without the interpreter lock, over libnghttp2.

It takes a tenth to a fifth of the processor time of gRPC's Python client, and notes answers when
they come, not when the interpreter has time for them. It needs no gevent; ``native_green`` runs it
under Locust.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import grpc
import numpy as np

from loadgen.loop import Loop
from loadgen.measure import Reply, Sample
from loadgen.options import LoadOptions
from loadgen.plan import LoadPlan, make_plan
from loadgen.target import ASK_S, REST_S, Target
from serve.errors import ConfigError, NotReady
from serve.native import LoadSender, front_lacks
from serve.wire.messages import INFER_METHOD, WireError, decode_facts

#: Connections of HTTP/1.1, each of which carries one request at a time.
_HTTP_CONNECTIONS = 512
#: Interval of the progress line.
_PROGRESS_S = 0.5
_COLUMNS = 6
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that ended; times are on the monotonic clock."""

    #: In the order of sending.
    index: int
    due_ns: int
    sent_ns: int
    reply: Reply
    #: Encoded answer, without its raw contents unless whole answers are kept.
    answer: bytes


def require_native() -> None:
    """Raise ConfigError, with what to install, where the compiled sender cannot run."""
    if lacks := front_lacks():
        raise ConfigError(
            f"--native: {lacks}; install it with `apt install libnghttp2-14` or your system's "
            "package of that library, or leave out --native"
        )


def refuse_unsendable(options: LoadOptions) -> None:
    """Raise ConfigError, which names the option, for what the compiled sender does not do."""
    for told, given in (
        ("--token-file", bool(options.token_files)),
        ("--ca", options.ca is not None),
        ("--requests with --in-flight", bool(options.in_flight and options.requests)),
    ):
        if given:
            raise ConfigError(f"--native does not take {told}: leave out one of them")


class NativeSender:
    """Sends encoded requests to one server, for one run after the other."""

    def __init__(
        self,
        address: str,
        timeout_s: float,
        *,
        connections: int = 1,
        whole_answers: bool = False,
    ) -> None:
        """Prepare without connecting.

        Args:
            address: HOST:PORT of a gRPC server, or the http:// URL that takes a POST.
            timeout_s: Time limit of each request from when it is due.
            connections: HTTP/2 connections; those of HTTP/1.1 are opened as needed.
            whole_answers: Keep answers with their raw contents.

        Raises ConfigError for any other address, and where libnghttp2 is missing.
        """
        require_native()
        self.address = address
        http = "://" in address
        url = urlsplit(address if http else f"//{address}")
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host, port = None, None
        if not host or port is None or (http and url.scheme != "http"):
            raise ConfigError(f"target '{address}' is not HOST:PORT")
        self._sender = LoadSender(
            host=host,
            port=port,
            path=(url.path or "/") if http else INFER_METHOD,
            http=http,
            connections=_HTTP_CONNECTIONS if http else connections,
            timeout_s=timeout_s,
            whole_answers=whole_answers,
        )

    @property
    def started_ns(self) -> int:
        """Start of the last run on the monotonic clock; 0 before the first."""
        return self._sender.started_ns

    @property
    def sent(self) -> int:
        """Number of requests sent in the last run."""
        return self._sender.sent

    def send_at(self, messages: Sequence[bytes], offsets_ns: Sequence[int]) -> None:
        """Send each message so long after the start; return when all have ended.

        Raises NotReady when nobody takes a connection.
        """
        with self._connecting():
            self._sender.send_at(messages, offsets_ns)

    def keep_in_flight(self, messages: Sequence[bytes], in_flight: int, duration_s: float) -> None:
        """Keep requests in flight, messages in turn, for a time (closed loop).

        Raises NotReady when nobody takes a connection.
        """
        with self._connecting():
            self._sender.keep_in_flight(messages, in_flight, duration_s)

    def stop(self) -> None:
        """End the run, now and for good; any thread."""
        self._sender.stop()

    def take(self) -> Iterator[Sent]:
        """Yield the requests that ended since the last call; any thread."""
        rows, answers, texts = self._sender.take()
        table = np.frombuffer(rows, np.int64).reshape(-1, _COLUMNS).tolist()
        for row, answer, text in zip(table, answers, texts, strict=True):
            index, due_ns, sent_ns, ended_ns, code, size_bytes = row
            reply = _reply(ended_ns, code, text, answer, size_bytes)
            yield Sent(index, due_ns, sent_ns, reply, answer)

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NotReady(f"no server answers at {self.address}: {error.strerror}") from None


def _reply(done_ns: int, code: int, text: str, answer: bytes, size_bytes: int) -> Reply:
    if code != 0:
        return Reply(done_ns, _NAMES.get(code, f"STATUS_{code}"), text)
    try:
        return Reply(done_ns, "OK", "", size_bytes, decode_facts(answer))
    except WireError as error:
        return Reply(done_ns, "MALFORMED", str(error), size_bytes)


class NativeLoop(Loop):
    """A run by the compiled sender."""

    def __init__(self, plan: LoadPlan, address: str, timeout_s: float) -> None:
        self._sender = NativeSender(address, timeout_s)
        super().__init__(plan, address)

    @property
    def sent(self) -> int:
        """Number of requests sent."""
        return self._sender.sent

    def send(self) -> None:
        """Send all requests; return when each has ended, or `stop` was called.

        Raises NotReady when nobody takes a connection.
        """
        wait_ns = max(0, self._started_ns - time.monotonic_ns())
        if (closed := self.plan.closed) is not None:
            time.sleep(wait_ns / 1e9)
            assert closed.duration_s is not None  # see `refuse_unsendable`
            messages = self.plan.messages
            self._sender.keep_in_flight(messages, closed.in_flight, closed.duration_s)
            return
        offsets_ns = [wait_ns + item.offset_ns for item in self.plan.trace.items]
        self._sender.send_at(self.plan.messages, offsets_ns)

    def stop(self) -> None:
        """End the run now; requests in flight are not in the samples."""
        self._sender.stop()

    def collect(self) -> list[Sample]:
        """Add the requests that ended since the last call to the samples, and return them."""
        self._started_ns = max(self._sender.started_ns or self._started_ns, self.start_at_ns)
        return [
            self.add(one.index, one.reply, due_ns=one.due_ns, sent_ns=one.sent_ns)
            for one in self._sender.take()
        ]

    def run(self, on_progress: Callable[[Loop], None] = lambda _: None) -> None:
        """Send on a thread, collect meanwhile; `on_progress` is called twice a second.

        Raises as `send` does.
        """
        self.begin()
        with ThreadPoolExecutor(1, "load") as thread:
            sending = thread.submit(self.send)
            while not wait([sending], _PROGRESS_S).done:
                self.collect()
                on_progress(self)
            self.end()
        self.collect()
        sending.result()


class _NativeTarget(Target):
    """A server whose solo times at the client are those of this client."""

    def lone_s(self, message: bytes) -> float:
        """Send an encoded request after a pause; returns its latency in seconds.

        Raises NotReady when there is no answer.
        """
        time.sleep(REST_S)
        sender = NativeSender(self.address, ASK_S)
        sender.send_at([message], [0])
        (one,) = sender.take()
        if one.reply.status != "OK":
            raise NotReady(f"{self.address}: {one.reply.message} ({one.reply.status})")
        return (one.reply.done_ns - one.sent_ns) / 1e9


def run_native(options: LoadOptions, on_progress: Callable[[Loop], None] = lambda _: None) -> Loop:
    """Load `options.target` and return the run; SIGINT or SIGTERM end the run early.

    Raises ConfigError, UnknownName or NotReady before the first request, never afterwards.
    """
    options.check()
    refuse_unsendable(options)
    require_native()
    target = _NativeTarget(options.target)
    try:
        plan = make_plan(options, target)
    finally:
        target.close()
    loop = NativeLoop(plan, options.target, options.timeout_s)
    with _stopping(loop):
        loop.run(on_progress)
    return loop


@contextmanager
def _stopping(loop: NativeLoop) -> Iterator[None]:
    """Have SIGINT and SIGTERM end the run."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: loop.stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, cast("Any", handler))
