"""A load client in a process of its own: each request at its time, whatever the server does.

The same encoded requests (``loadgen.plan``) go to any server, over gRPC or as the body of a POST,
by ``loadgen``'s compiled sender. Latency counts from the *intended* send time. Answers are read
when the run is over, so that this takes nothing from the server's cores.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import process_time

from loadgen.measure import Sample
from loadgen.native import NativeSender
from loadgen.options import LoadOptions
from loadgen.plan import LoadPlan, make_plan
from serve.workload import ResidentSpec

#: After this long without an answer a request counts as failed.
TIMEOUT_S = 20.0
#: Features of the demo models.
FEATURES = 32


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
    errors: int
    elapsed_s: float
    cpu_s: float


class LoadProcess:
    """Sends requests on demand; see `load_process`."""

    def __init__(self, process: ProcessPoolExecutor) -> None:
        self._process = process
        # It is there before anything is measured.
        self.pid = process.submit(os.getpid).result()

    def run(self, trace: Path, address: str) -> LoadRun:
        """Send the trace to `address`: HOST:PORT of a gRPC server, or a URL."""
        return self._process.submit(_send_trace, trace, address).result()

    def keep_in_flight(
        self, messages: Sequence[bytes], in_flight: int, duration_s: float, address: str
    ) -> ClosedRun:
        """Keep requests in flight for a time, messages in turn (closed loop)."""
        asked = tuple(messages), in_flight, duration_s, address
        return self._process.submit(_keep_in_flight, *asked).result()


@contextmanager
def load_process() -> Iterator[LoadProcess]:
    """Yield a client process, and end it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield LoadProcess(process)


@cache
def _plan_of(trace: Path) -> LoadPlan:
    return make_plan(LoadOptions(target="", trace=trace), Shapes())


def _send_trace(trace: Path, address: str) -> LoadRun:
    plan, sender = _plan_of(trace), NativeSender(address, TIMEOUT_S)
    cpu_before_s = process_time()
    sender.send_at(plan.messages, [item.offset_ns for item in plan.trace.items])
    cpu_s = process_time() - cpu_before_s
    ended = sorted(sender.take(), key=lambda one: one.index)
    seen = tuple(
        Sample.of(item, one.index, one.reply, due_ns=one.due_ns, sent_ns=one.sent_ns)
        for item, one in zip(plan.trace.items, ended, strict=True)
    )
    last_ns = max(one.reply.done_ns for one in ended)
    return LoadRun(seen, (last_ns - sender.started_ns) / 1e9, cpu_s)


def _keep_in_flight(
    messages: tuple[bytes, ...], in_flight: int, duration_s: float, address: str
) -> ClosedRun:
    sender = NativeSender(address, TIMEOUT_S)
    cpu_before_s = process_time()
    sender.keep_in_flight(messages, in_flight, duration_s)
    cpu_s = process_time() - cpu_before_s
    ended = list(sender.take())
    last_ns = max((one.reply.done_ns for one in ended), default=sender.started_ns)
    return ClosedRun(
        latencies_ns=tuple(
            one.reply.done_ns - one.sent_ns for one in ended if one.reply.status == "OK"
        ),
        errors=sum(one.reply.status != "OK" for one in ended),
        elapsed_s=(last_ns - sender.started_ns) / 1e9,
        cpu_s=cpu_s,
    )


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

    def slots(self) -> int:
        raise AssertionError("a trace has its rate")

    def solo_s(self, model: str, num_nodes: int, num_edges: int) -> float:
        raise AssertionError("a trace has its rate")

    def sample_solo_s(self, model: str, spec: ResidentSpec, num_ids: int) -> float:
        raise AssertionError("a trace has its rate")

    def graph(self, name: str, node_type: str) -> tuple[int, str]:
        raise AssertionError("its requests bring their graphs")

    def lone_s(self, message: bytes) -> float:
        raise AssertionError("a trace has its rate")

    def models(self) -> tuple[str, ...]:
        raise AssertionError("a trace has its models")

    def inputs(self, model: str) -> dict[str, tuple[int, ...]]:
        return {"x": (-1, FEATURES), "edge_index": (2, -1)}
