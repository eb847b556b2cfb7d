"""Master of a run in several processes: divides it among Locust's workers and gathers samples."""

from loadgen import patched  # noqa: F401  isort: skip

import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic, monotonic_ns, time_ns
from typing import Any

import gevent
from gevent.event import AsyncResult, Event
from locust.runners import STATE_MISSING, MasterRunner

from loadgen.measure import Sample
from loadgen.options import LoadOptions
from loadgen.parts import DividedLoop, divide
from loadgen.plan import LoadPlan
from serve.errors import NotReady

_log = logging.getLogger(__name__)

#: Messages of Locust's: to workers …
PART, START = "gnnserve-part", "gnnserve-start"
#: … and from them.
TAKEN, PREPARED, FAILED = "gnnserve-taken", "gnnserve-prepared", "gnnserve-failed"
SAMPLES = "gnnserve-samples"
#: A part is sent again to a worker that has not taken it: Locust drops what comes while the worker,
#: connected already, does not listen yet.
_REPEAT_S = 2.0
#: Time for all workers to make their requests.
_PREPARE_S = 600.0
#: Workers begin so long after they are told to.
_LEAD_NS = 500_000_000
#: A worker from which nothing came for so long, not even a heartbeat, is lost.
_LOST_S = 15.0
#: Time for the last samples to come after a stop.
_SETTLE_S = 10.0
_LOOK_S = 0.2


def boot_id() -> str:
    """Return what processes with the same monotonic clock have in common."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class GreenDividedLoop(DividedLoop):
    """A divided run that greenlets can wait for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: Set when every part has ended or its worker is lost.
        self.ended = AsyncResult()


class Master:
    """Has the workers of a Locust master send runs, one after the other."""

    def __init__(self, runner: MasterRunner, on_sample: Callable[[Sample], None]) -> None:
        """Listen to the workers; `on_sample` is called with every request that ended."""
        self._runner = runner
        self._on_sample = on_sample
        # The runs of two masters, one after the other, have different numbers.
        self._run = time_ns()
        self._loop: GreenDividedLoop | None = None
        self._untaken: set[str] = set()
        self._waited_for: set[str] = set()
        self._fault = ""
        self._changed = Event()
        self._begun = False
        runner.register_message(TAKEN, self._taken)
        runner.register_message(PREPARED, self._prepared)
        runner.register_message(FAILED, self._failed)
        runner.register_message(SAMPLES, self._heard)

    def prepare(self, plan: LoadPlan, options: LoadOptions, *, native: bool) -> GreenDividedLoop:
        """Give each worker its part; return when all have made their requests.

        Raises ConfigError for a plan that cannot be divided, and NotReady with the reason when a
        worker cannot send its part.
        """
        self._run += 1
        workers = sorted(self._alive())
        if not workers:
            raise NotReady("no worker has connected")
        parts = divide(plan, options, len(workers), run=self._run, native=native)
        self._fault, self._waited_for, self._untaken = "", set(workers), set(workers)
        self._begun = False
        part_of = dict(zip(workers, parts, strict=True))
        self._loop = GreenDividedLoop(plan, options.target, part_of)
        send_s = monotonic()
        give_up_s = send_s + _PREPARE_S
        # A worker that was busy for seconds counts as missing until its next heartbeat.
        while (self._waited_for or not self._alive().issuperset(workers)) and not self._fault:
            if monotonic() >= send_s:
                for worker in self._untaken:
                    self._runner.send_message(PART, part_of[worker].encode(), client_id=worker)
                send_s = monotonic() + _REPEAT_S
            self._changed.clear()
            self._changed.wait(_LOOK_S)
            if gone := self._waited_for - set(self._runner.clients):
                self._fault = f"{len(gone)} of {len(workers)} workers ended"
            elif monotonic() > give_up_s:
                self._fault = f"a worker is not ready after {_PREPARE_S:g} s"
        if self._fault:
            raise NotReady(self._fault)
        return self._loop

    def begin(self) -> None:
        """Have the workers begin together; does nothing for a run that has begun."""
        loop = self._loop
        if loop is None or self._begun:
            return
        self._begun = True
        at_ns = loop.start_at_ns = monotonic_ns() + _LEAD_NS
        loop.begin()
        start = {"run": self._run, "boot": boot_id(), "at_ns": at_ns, "in_ns": _LEAD_NS}
        self._runner.send_message(START, start)
        gevent.spawn(self._watch, loop)

    def settle(self) -> None:
        """Wait for the last samples of a run that was stopped."""
        if self._begun and self._loop is not None:
            self._loop.ended.wait(_SETTLE_S)

    def _alive(self) -> set[str]:
        clients = self._runner.clients
        return {name for name, one in clients.items() if one.state != STATE_MISSING}

    def _watch(self, loop: GreenDividedLoop) -> None:
        """End the run when every part has ended; a worker that is lost ends its own."""
        seen_s = dict.fromkeys(loop.sending, monotonic())
        while loop.sending and loop is self._loop:
            gevent.sleep(_LOOK_S)
            now_s = monotonic()
            seen_s |= dict.fromkeys(self._alive(), now_s)
            lost = {one for one in loop.sending if now_s - seen_s[one] > _LOST_S}
            if lost:
                _log.error("%d workers are lost, and what they had to send", len(lost))
                loop.sending -= lost
        loop.end()
        loop.ended.set(None)

    def _taken(self, environment: Any, msg: Any, **_: Any) -> None:
        if msg.data["run"] == self._run:
            self._untaken.discard(msg.node_id)

    def _prepared(self, environment: Any, msg: Any, **_: Any) -> None:
        if msg.data["run"] == self._run:
            self._waited_for.discard(msg.node_id)
            self._changed.set()

    def _failed(self, environment: Any, msg: Any, **_: Any) -> None:
        if msg.data["run"] == self._run:
            self._fault = msg.data["error"]
            self._changed.set()

    def _heard(self, environment: Any, msg: Any, **_: Any) -> None:
        if self._loop is not None:
            for sample in self._loop.hear(msg.node_id, msg.data):
                self._on_sample(sample)
