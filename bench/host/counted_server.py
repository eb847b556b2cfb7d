"""``bench.kit.live_server`` in which the processor time of every part of a request is counted.

    GNNSERVE_BENCH_PARTS=FILE python -m bench.host.counted_server --config FILE

The functions of ``PARTS`` are wrapped: each takes its thread's processor time before and after,
less what other parts took within it. On SIGUSR1 what was counted so far is written to the file as
JSON: calls and nanoseconds by part. For ``bench.host.host_parts``.
"""

import functools
import importlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns
from typing import Any

from bench.kit import live_server

#: Part: what is in it, as module:function or module:Class.method where it is called from.
PARTS = {
    "gRPC: a call's head": ("grpc._server:_handle_call",),
    "gRPC: other events": ("grpc._server:_process_event_and_continue",),
    "gRPC: around the handler": ("grpc._server:_unary_response_in_pool",),
    "gRPC: answer": ("grpc._server:_status",),
    "handler": (
        "serve.rpc.service:InferenceService.ModelInfer",
        "serve.rpc.service:InferenceService._submit",
        "serve.rpc.service:InferenceService._infer",
        "serve.rpc.statistics:Statistics.succeeded",
        "serve.rpc.gate:Gate.enter",
        "serve.rpc.gate:Gate.leave",
    ),
    "decode": ("serve.rpc.service:decode_request", "serve.rpc.service:decode_call"),
    "estimate": ("serve.estimate.estimator:ModelEstimator.estimate",),
    "accept": (
        "serve.server.engine:Engine.submit",
        "serve.server.intake:Intake.submit",
        "serve.server.request_inputs:plan_layout",
        "serve.server.driver:Driver.accept",
    ),
    "stage": ("serve.server.request_inputs:TensorInputs.stage",),
    "scheduler": (
        "serve.core.scheduler:Scheduler.handle",
        "serve.core.scheduler:Scheduler.next_wakeup",
    ),
    "commands": (
        "serve.server.driver:Driver._carry_out",
        "serve.server.driver:Driver._execute",
        "serve.server.ticket:RequestTicket.command_prepare",
        "serve.server.ticket:RequestTicket.command_answer",
    ),
    "to a lane": (
        "serve.server.lane_run:LaneRun.message",
        "serve.server.lanes.pool:LanePool.launch",
        "serve.server.lanes.pool:LanePool.send",
        "serve.server.lanes.pool:LanePool.suspend",
        "serve.server.lanes.pool:LanePool.resume",
    ),
    "from a lane": (
        "serve.server.lanes.pool:LanePool.poll",
        "serve.server.driver:Driver._hear",
        "serve.server.driver:Driver._keep_time",
        "serve.server.lane_monitor:LaneMonitor._ended",
    ),
    "answer": (
        "serve.server.ticket:RequestTicket.result",
        "serve.server.request_inputs:TensorInputs.read_output",
        "serve.server.driver:Driver.answered",
        "serve.server.driver:Driver.unhold",
        "serve.rpc.service:encode_answer",
    ),
    "learn": ("serve.server.driver:Driver._learn", "serve.server.engine:Engine.learn"),
    "metrics": ("serve.obs.metrics:Metrics.observe",),
    "database": ("serve.obs.sink:RecordSink._store_batch",),
}
#: In the environment: where it writes.
FILE = "GNNSERVE_BENCH_PARTS"
SIGNAL = signal.SIGUSR1


class _Counts(threading.local):
    """Of one thread: calls and nanoseconds by part, and what parts within open ones took."""

    def __init__(self) -> None:
        self.within_ns: list[int] = []
        self.calls: Counter[str] = Counter()
        self.taken_ns: Counter[str] = Counter()
        _ALL.append((self.calls, self.taken_ns))


_ALL: list[tuple[Counter[str], Counter[str]]] = []
_COUNTS = _Counts()


def main() -> None:
    for part, functions in PARTS.items():
        for place in functions:
            module, _, path = place.partition(":")
            owner: Any = importlib.import_module(module)
            *classes, name = path.split(".")
            for one in classes:
                owner = getattr(owner, one)
            setattr(owner, name, _counted(part, getattr(owner, name)))
    signal.signal(SIGNAL, lambda *_: _write(Path(os.environ[FILE])))
    live_server.main()


def _counted(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        counts = _COUNTS
        counts.within_ns.append(0)
        started_ns = thread_time_ns()
        try:
            return function(*arguments, **keywords)
        finally:
            taken_ns = thread_time_ns() - started_ns
            counts.calls[part] += 1
            counts.taken_ns[part] += taken_ns - counts.within_ns.pop()
            if counts.within_ns:
                counts.within_ns[-1] += taken_ns

    return call


def _write(path: Path) -> None:
    calls: Counter[str] = Counter()
    taken_ns: Counter[str] = Counter()
    for of_calls, of_time in _ALL:
        # Their threads go on: a copy is made in one step.
        calls.update(dict(of_calls))
        taken_ns.update(dict(of_time))
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"calls": calls, "taken_ns": taken_ns}))
    new.rename(path)


if __name__ == "__main__":
    main()
