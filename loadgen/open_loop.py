"""Send a plan's requests at their times, whatever the server does.

One greenlet per request. A request's latency starts at its *intended* send time, so that neither a
slow server nor a slow generator can hide behind requests sent late; how late they were sent is
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

#: Timers of the event loop and waking up are off by 0.2 to 0.8 ms, a tenth of a small target: wake
#: this much early, and pass the rest handling answers.
_EARLY_NS = 400_000


class OpenLoop:
    """One run of one plan. `samples` grows while `run` runs."""

    def __init__(self, plan: LoadPlan, target: Target, timeout_s: float) -> None:
        self.plan = plan
        self.sent = 0
        self.samples: list[Sample] = []
        #: Set when everything has ended, to the error if there was one.
        self.ended = AsyncResult()
        self._target = target
        self._timeout_ns = round(timeout_s * 1e9)
        self._flights = Group()
        self._started_ns = perf_counter_ns()
        self._cpu_started_ns = process_time_ns()

    @property
    def elapsed_s(self) -> float:
        """Since the trace's time zero."""
        return (perf_counter_ns() - self._started_ns) / 1e9

    def run(self, on_sample: Callable[[Sample], None]) -> None:
        """Send everything and wait for every answer; each ends by its timeout at the latest."""
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
        """Of the run until now."""
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
    """Return at `due_ns` or as soon after as possible; other greenlets run meanwhile."""
    early_s = (due_ns - _EARLY_NS - perf_counter_ns()) / 1e9
    if early_s > 0:
        # A native sleep in a thread is exact; the loop's own timers round up to a millisecond.
        gevent.get_hub().threadpool.apply(get_original("time", "sleep"), (early_s,))
    gevent.sleep(0)
    while perf_counter_ns() < due_ns:
        gevent.sleep(0)
