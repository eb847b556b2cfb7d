"""Time of training jobs: what tells of a run how many jobs trained beside it.

It is measured for what is learned from runs; no decision about a request reads it.
"""

from serve.core.state.record import Run
from serve.core.types import ZERO_NS, Nanos


class JobTime:
    """How long jobs have trained, summed over them."""

    __slots__ = ("_at_ns", "_total_ns", "running")

    def __init__(self) -> None:
        #: Jobs that train now.
        self.running = 0
        self._total_ns, self._at_ns = 0, ZERO_NS

    def set_running(self, running: int, now_ns: Nanos) -> None:
        """Count so many jobs from now on."""
        if running != self.running:
            self._total_ns = self.total_ns(now_ns)
            self.running, self._at_ns = running, now_ns

    def total_ns(self, now_ns: Nanos) -> int:
        """Return the time up to now."""
        return self._total_ns + self.running * (now_ns - self._at_ns)

    def beside_ns(self, run: Run, now_ns: Nanos) -> Nanos:
        """Return how long jobs have trained beside the run."""
        return Nanos(run.job_run_ns + (self.total_ns(now_ns) if run.executing else 0))
