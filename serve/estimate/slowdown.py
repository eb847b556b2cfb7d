"""Slowdown of runs beside others, learned from runs beside others.

By the number of others on the device that executed beside a run, on average over it; all models
share one table, as what they take from one another is the device's. It starts from requests that
the server sends itself (``serve.server.learning.beside``) and follows every run after that. What
training jobs do to runs has a table of its own, from runs beside jobs.
"""

import math
from itertools import accumulate

#: Share of the newest observation, once there are so many that their mean would count it less.
_SHARE = 0.1


class SlowdownEstimator:
    """A factor by number of others, interpolated between whole numbers."""

    def __init__(self) -> None:
        #: Logarithm of the factor beside 0, 1, 2, … others, and what observations it rests on.
        self._log = [0.0]
        self._seen = [0.0]

    def factor(self, beside: float) -> float:
        """Return the slowdown: at least 1, and 1 for a run alone or where nothing is known."""
        index, share = self._place(beside)
        return math.exp(max(0.0, self._at(index, share)))

    def observe(self, beside: float, ratio: float) -> None:
        """Take measured ÷ expected-when-alone of a run beside so many others on average."""
        while len(self._log) < beside + 1:
            self._log.append(self._log[-1])
            self._seen.append(0.0)
        # k others on the same core cost a factor k + 1; more than twice that was something else.
        most = math.log(2.0 * (beside + 1))
        # Also below 1, or what scatters around 1 would count as more.
        seen = min(max(-most, math.log(ratio)), most)
        index, share = self._place(beside)
        error = seen - self._at(index, share)
        for i, weight in ((index, 1 - share), (index + 1, share)):
            if i > 0 and weight > 0:
                self._seen[i] += weight
                self._log[i] += max(_SHARE, 1 / max(1.0, self._seen[i])) * weight * error

    @property
    def table(self) -> tuple[float, ...]:
        """Beside 0, 1, 2, … others: starts at 1, never falls, in hundredths."""
        return tuple(round(math.exp(log), 2) for log in accumulate(self._log, max))

    def _at(self, index: int, share: float) -> float:
        low = self._log[index]
        return low if share == 0 else low + (self._log[index + 1] - low) * share

    def _place(self, beside: float) -> tuple[int, float]:
        """Return the whole number below and the share to the next; the last known for more."""
        index = int(beside)
        most = len(self._log) - 1
        return (index, beside - index) if index < most else (most, 0.0)


class Slowdowns:
    """What slows runs on a device: other runs, and training jobs."""

    def __init__(self) -> None:
        self.by_runs, self.by_jobs = SlowdownEstimator(), SlowdownEstimator()

    def factor(self, beside: float, jobs: float = 0.0) -> float:
        """Return the slowdown beside so many other runs and jobs on average."""
        return self.by_runs.factor(beside) * self.by_jobs.factor(jobs)

    def observe(self, beside: float, jobs: float, ratio: float) -> None:
        """Take measured ÷ expected-when-alone of a run.

        What one beside jobs took more than beside the other runs is the jobs' doing.
        """
        if jobs > 0:
            self.by_jobs.observe(jobs, ratio / self.by_runs.factor(beside))
        else:
            self.by_runs.observe(beside, ratio)
