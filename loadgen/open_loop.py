"""Client on gRPC's Python library: each request at its time, whatever the server does (open loop).

Every request has a greenlet. Latency counts from the *intended* send time, so that requests sent
late hide neither a slow server nor a slow generator (coordinated omission). The send lag is
measured as well. With a closed loop each greenlet sends one request after the other.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from time import monotonic_ns

from loadgen import patched  # noqa: F401  isort: skip

import gevent
import grpc
from gevent.event import AsyncResult
from gevent.monkey import get_original
from gevent.pool import Group

from loadgen.loop import Loop
from loadgen.measure import Reply, Sample
from loadgen.plan import ClosedLoop, LoadPlan
from loadgen.target import Target
from serve.client.channel import Metadata
from serve.wire.messages import WireError, decode_response

#: Wake up this much before a send and handle answers until then. Timers and wake-ups are off by
#: 0.2 to 0.8 ms, a tenth of a small target.
_EARLY_NS = 400_000


class OpenLoop(Loop):
    """A run on greenlets of this thread."""

    def __init__(self, plan: LoadPlan, target: Target, timeout_s: float) -> None:
        super().__init__(plan, target.address)
        #: Set when the run has ended, with its error if it failed.
        self.ended = AsyncResult()
        self._sent = 0
        self._target = target
        self._timeout_ns = round(timeout_s * 1e9)
        self._flights = Group()

    @property
    def sent(self) -> int:
        """Number of requests sent."""
        return self._sent

    def drive(self, on_sample: Callable[[Sample], None]) -> None:
        """Send all requests and wait until each is answered or timed out.

        Args:
            on_sample: Called with every request that ended.
        """
        self.begin()
        try:
            _sleep_until(self._started_ns)
            if self.plan.closed is None:
                for index, item in enumerate(self.plan.trace.items):
                    due_ns = self._started_ns + item.offset_ns
                    _sleep_until(due_ns)
                    self._flights.spawn(self._fly, index, due_ns, on_sample)
            else:
                numbers = self._numbers(self.plan.closed)
                for _ in range(self.plan.closed.in_flight):
                    self._flights.spawn(self._fly_in_turn, numbers, on_sample)
            self._flights.join(raise_error=True)
        except Exception as error:
            self.ended.set_exception(error)
            raise
        else:
            self.end()
            self.ended.set(None)
        finally:
            self._flights.kill()

    def _numbers(self, closed: ClosedLoop) -> Iterator[int]:
        """Yield the numbers of the requests of a closed loop until it is over."""
        numbers = itertools.count() if closed.requests is None else iter(range(closed.requests))
        end_s = math.inf if closed.duration_s is None else closed.duration_s
        for number in numbers:
            if self.elapsed_s >= end_s:
                return
            yield number

    def _fly_in_turn(self, numbers: Iterator[int], on_sample: Callable[[Sample], None]) -> None:
        """Send one request after the other."""
        for index in numbers:
            self._fly(index, monotonic_ns(), on_sample)

    def _fly(self, index: int, due_ns: int, on_sample: Callable[[Sample], None]) -> None:
        sent_ns = monotonic_ns()
        self._sent += 1
        left_s = max(0, due_ns + self._timeout_ns - sent_ns) / 1e9
        number = index % len(self.plan.messages)
        tenant = self.plan.trace.items[number].tenant
        reply = self._ask(self.plan.messages[number], left_s, self._target.metadata(tenant))
        on_sample(self.add(index, reply, due_ns=due_ns, sent_ns=sent_ns))

    def _ask(self, message: bytes, timeout_s: float, metadata: Metadata) -> Reply:
        """Send one encoded request; blocks this greenlet only."""
        done = AsyncResult()
        # NOTE: a blocking call would occupy one of the 1,024 threads that gevent gives gRPC, and
        # once they are used up every further send would stall. A future occupies none.
        call = self._target.infer.future(message, timeout=timeout_s, metadata=metadata)
        call.add_done_callback(lambda _: done.set(monotonic_ns()))
        try:
            done_ns: int = done.get()
        finally:
            call.cancel()
        code = call.code()
        if code is not grpc.StatusCode.OK:
            return Reply(done_ns, code.name, call.details() or "")
        data: bytes = call.result()
        try:
            return Reply(done_ns, "OK", "", len(data), decode_response(data).parameters)
        except WireError as error:
            return Reply(done_ns, "MALFORMED", str(error), len(data))


def _sleep_until(due_ns: int) -> None:
    """Return at `due_ns` or as soon as possible afterwards; other greenlets run meanwhile."""
    early_s = (due_ns - _EARLY_NS - monotonic_ns()) / 1e9
    if early_s > 0:
        # A native sleep in a thread is exact; gevent's own timers round up to a millisecond.
        gevent.get_hub().threadpool.apply(get_original("time", "sleep"), (early_s,))
    gevent.sleep(0)
    while monotonic_ns() < due_ns:
        gevent.sleep(0)
