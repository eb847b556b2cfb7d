"""The process behind ``bench.kit.open_loop``: python -m bench.kit.load_client CLIENT FD

It sends traces, or keeps requests in flight, as it is told over the pipe FD.
"""

import sys
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time
from typing import Any

if __name__ == "__main__" and sys.argv[1] == "python":
    from loadgen import patched  # noqa: F401

from bench.kit.open_loop import TIMEOUT_S, ClosedRun, LoadRun, Shapes
from loadgen.measure import Sample
from loadgen.native import NativeSender
from loadgen.options import LoadOptions
from loadgen.plan import LoadPlan, make_plan


@cache
def plan_of(trace: Path) -> LoadPlan:
    """Return the trace and its encoded requests."""
    return make_plan(LoadOptions(target="", trace=trace), Shapes())


class Native:
    """The compiled sender."""

    def send_trace(self, trace: Path, address: str) -> LoadRun:
        plan, sender = plan_of(trace), NativeSender(address, TIMEOUT_S)
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

    def keep_in_flight(
        self, messages: tuple[bytes, ...], in_flight: int, duration_s: float, address: str
    ) -> ClosedRun:
        sender = NativeSender(address, TIMEOUT_S)
        cpu_before_s = process_time()
        sender.keep_in_flight(messages, in_flight, duration_s)
        cpu_s = process_time() - cpu_before_s
        ended = list(sender.take())
        answered = [one for one in ended if one.reply.status == "OK"]
        last_ns = max((one.reply.done_ns for one in ended), default=sender.started_ns)
        return ClosedRun(
            tuple(one.reply.done_ns - one.sent_ns for one in answered),
            sum(bool(one.reply.parameters.get("qos_violated")) for one in answered),
            tuple(
                f"{one.reply.status}: {one.reply.message}"
                for one in ended
                if one.reply.status != "OK"
            ),
            (last_ns - sender.started_ns) / 1e9,
            cpu_s,
        )


class Python:
    """The generator's client on gRPC's Python library."""

    def send_trace(self, trace: Path, address: str) -> LoadRun:
        from loadgen.open_loop import OpenLoop
        from loadgen.target import Target

        target = Target(address)
        try:
            loop = OpenLoop(plan_of(trace), target, TIMEOUT_S)
            loop.drive(lambda _: None)
            cpu_s = loop.cpu_s
        finally:
            target.close()
        seen = sorted(loop.samples, key=lambda sample: sample.index)
        return LoadRun(tuple(seen), loop.elapsed_s, cpu_s)


def main(client: str, descriptor: int) -> None:
    """Do what is asked over the pipe until it is closed."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    worker = {"native": Native, "python": Python}[client]()
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(worker, name)(*arguments))
        except Exception as error:
            pipe.send(error)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
