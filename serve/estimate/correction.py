"""Following a machine that is not what it was at calibration.

A ratio of measured to expected time is noisy, sometimes absurdly so (a page fault storm, a
neighbour), and sometimes changes for good (another clock frequency, another tenant). The median
of a short window ignores the first and follows the second after half a window.
"""

import math
from collections import deque
from statistics import median

_WINDOW = 11
#: Weight of the calibration itself in a fresh window, in observations.
_PRIOR = 4


class Drift:
    """A factor on expected values that follows the median of recent measured ÷ expected."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque([0.0] * _PRIOR, maxlen=_WINDOW)
        self.factor = 1.0

    def observe(self, measured: float, expected: float) -> None:
        """Take one pair, both positive; `expected` is without the factor."""
        self._recent.append(math.log(measured / expected))
        self.factor = math.exp(median(self._recent))


class Quantile:
    """A running quantile of ratios, at least 1, by small steps up and down."""

    def __init__(self, start: float, level: float = 0.95, step: float = 0.04) -> None:
        self._log = math.log(max(start, 1.0))
        self._up, self._down = step * level, step * (1 - level)
        self.value = max(start, 1.0)

    def observe(self, ratio: float) -> None:
        """Take one ratio, positive."""
        above = math.log(ratio) > self._log
        self._log = max(0.0, self._log + (self._up if above else -self._down))
        self.value = math.exp(self._log)


class Interference:
    """How much slower a run is beside k others, learned from runs beside k others."""

    #: Share of the newest observation.
    _SHARE = 0.1

    def __init__(self) -> None:
        self._log: dict[int, float] = {}

    def factor(self, co_runners: int) -> float:
        """At least 1; 1 for a run alone and where nothing is known."""
        return math.exp(self._log.get(co_runners, 0.0))

    def observe(self, co_runners: int, ratio: float) -> None:
        """Take measured ÷ expected-when-alone of a run beside `co_runners` others."""
        # k others on the same core cost a factor k + 1; more than twice that was something else.
        seen = min(max(0.0, math.log(ratio)), math.log(2.0 * (co_runners + 1)))
        known = self._log.get(co_runners, 0.0)
        self._log[co_runners] = known + self._SHARE * (seen - known)
