"""Open-loop client: sends each request of a plan at its time, whatever the server does.

Every request has a greenlet. Latency counts from the *intended* send time, so that requests sent
late hide neither a slow server nor a slow generator (coordinated omission). The send lag is
measured as well.
"""

from collections.abc import Callable
from time import perf_counter_ns, process_time_ns

from loadgen import patched  # noqa: F401  isort: skip

import gevent
from gevent.event import AsyncResult
from gevent.monkey import get_original
from gevent.pool import Group

from loadgen.measure import LoadSummary, Sample, summarise
from loadgen.plan import LoadPlan
from loadgen.target import Target

#: Wake up this much before a send and handle answers until then. Timers and wake-ups are off by
#: 0.2 to 0.8 ms, a tenth of a small target.
_EARLY_NS = 400_000


class OpenLoop:
    """One run of one plan; `samples` grows during ``run``."""

    def __init__(self, plan: LoadPlan, target: Target, timeout_s: float) -> None:
        self.plan = plan
        self.sent = 0
        self.samples: list[Sample] = []
        #: Set when the run has ended, with its error if it failed.
        self.ended = AsyncResult()
        self._target = target
        self._timeout_ns = round(timeout_s * 1e9)
        self._flights = Group()
        self._started_ns = perf_counter_ns()
        self._cpu_started_ns = process_time_ns()

    @property
    def elapsed_s(self) -> float:
        """Time since the start of the trace."""
        return (perf_counter_ns() - self._started_ns) / 1e9

    def run(self, on_sample: Callable[[Sample], None]) -> None:
        """Send all requests and wait until each is answered or timed out.

        Args:
            on_sample: Called with every request that ended.
        """
        self._started_ns = perf_counter_ns()
        self._cpu_started_ns = process_time_ns()
        try:
            for index, item in enumerate(self.plan.trace.items):
                _sleep_until(self._started_ns + item.offset_ns)
                self._flights.spawn(self._fly, index, on_sample)
            self._flights.join(raise_error=True)
        except Exception as error:
            self.ended.set_exception(error)
            raise
        else:
            self.ended.set(None)
        finally:
            self._flights.kill()

    def summary(self) -> LoadSummary:
        """Summarize the run until now."""
        return summarise(
            self._target.address,
            self.plan.trace.header,
            self.samples,
            scheduled=len(self.plan.messages),
            elapsed_s=self.elapsed_s,
            cpu_s=(process_time_ns() - self._cpu_started_ns) / 1e9,
        )

    def _fly(self, index: int, on_sample: Callable[[Sample], None]) -> None:
        item = self.plan.trace.items[index]
        due_ns = self._started_ns + item.offset_ns
        sent_ns = perf_counter_ns()
        self.sent += 1
        left_s = max(0, due_ns + self._timeout_ns - sent_ns) / 1e9
        answer = self._target.infer(self.plan.messages[index], left_s)
        target_us = answer.parameters.get("qos_target_us", item.qos_target_us)
        sample = Sample(
            model=item.model,
            due_ns=item.offset_ns,
            lag_ns=sent_ns - due_ns,
            latency_ns=answer.done_ns - due_ns,
            status=answer.status,
            message=answer.message,
            size_bytes=answer.size_bytes,
            target_us=None if target_us is None else int(target_us),
            late_by_server=bool(answer.parameters.get("qos_violated", False)),
        )
        self.samples.append(sample)
        on_sample(sample)


def _sleep_until(due_ns: int) -> None:
    """Return at `due_ns` or as soon as possible afterwards; other greenlets run meanwhile."""
    early_s = (due_ns - _EARLY_NS - perf_counter_ns()) / 1e9
    if early_s > 0:
        # A native sleep in a thread is exact; gevent's own timers round up to a millisecond.
        gevent.get_hub().threadpool.apply(get_original("time", "sleep"), (early_s,))
    gevent.sleep(0)
    while perf_counter_ns() < due_ns:
        gevent.sleep(0)
