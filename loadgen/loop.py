"""One run of one plan: what every way of sending it counts."""

from abc import ABC, abstractmethod
from time import monotonic_ns, process_time_ns

import msgspec

from loadgen.measure import LoadSummary, Reply, Sample, summarise
from loadgen.plan import LoadPlan


class Loop(ABC):
    """A run against the server at `address`; `samples` grows while it lasts."""

    def __init__(self, plan: LoadPlan, address: str) -> None:
        self.plan = plan
        self.address = address
        self.samples: list[Sample] = []
        #: Earliest start, on the monotonic clock.
        self.start_at_ns = 0
        self.begin()

    @property
    @abstractmethod
    def sent(self) -> int:
        """Number of requests sent."""

    def begin(self) -> None:
        """Start to count time and processor time."""
        self._cpu_started_ns = process_time_ns()
        self._started_ns = max(monotonic_ns(), self.start_at_ns)
        self._ended_ns: int | None = None

    def end(self) -> None:
        """Stop to count time."""
        self._ended_ns = monotonic_ns()

    @property
    def elapsed_s(self) -> float:
        """Time since the start of the trace, until its end."""
        now_ns = monotonic_ns() if self._ended_ns is None else self._ended_ns
        return max(0, now_ns - self._started_ns) / 1e9

    @property
    def processes(self) -> int:
        """Number of processes that send."""
        return 1

    @property
    def cpu_s(self) -> float:
        """Processor time of this process since the start of the trace."""
        return (process_time_ns() - self._cpu_started_ns) / 1e9

    def add(self, index: int, reply: Reply, *, due_ns: int, sent_ns: int) -> Sample:
        """Keep the end of request number `index`, due and sent then on the monotonic clock."""
        items = self.plan.trace.items
        item = items[index % len(items)]
        sample = Sample.of(item, index, reply, due_ns=due_ns, sent_ns=sent_ns)
        if self.plan.closed is not None:
            sample = msgspec.structs.replace(sample, due_ns=max(0, due_ns - self._started_ns))
        self.samples.append(sample)
        return sample

    def summary(self) -> LoadSummary:
        """Summarize the run until now."""
        return summarise(
            self.address,
            self.plan.trace.header,
            self.samples,
            scheduled=len(self.samples if self.plan.closed else self.plan.trace.items),
            elapsed_s=self.elapsed_s,
            cpu_s=self.cpu_s,
            processes=self.processes,
        )
