"""Following a machine that is not what it was at calibration.

Three things make a run take longer than calibration said, and each is learned by itself: the
machine (``Drift``, fast), a size of graph that the fit gets wrong or that costs something only in
a lane (``SizeBias``, slow), and other runs beside it (``slowdown``, slow).

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
#: Values after which what is expected can be said to disagree with what is measured.
_TELLING = 50


#: Centres of sizes in ns: the lowest, their distance as a logarithm, and how many.
_LOWEST, _STEP, _CENTRES = 50_000.0, math.log(4.0), 10


class Drift:
    """A factor on expected values that follows the median of recent measured ÷ expected."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque([0.0] * _PRIOR, maxlen=_WINDOW)
        self.factor = 1.0

    def observe(self, measured: float, expected: float) -> None:
        """Take one pair, both positive; `expected` is without the factor."""
        self._recent.append(math.log(measured / expected))
        self.factor = math.exp(median(self._recent))


class SizeBias:
    """A factor on expected values that depends on their size, smoothly.

    Centres lie a factor 4 apart; between two, the logarithm of the factor is interpolated. It is
    bounded so that a larger expected value always stays the larger one.
    """

    #: Neighbours differ by less than `_STEP`, which is what keeps the order.
    _BOUND = 0.45 * _STEP
    _SHARE = 0.1
    #: One observation counts no more than this.
    _CLIP = 0.3

    def __init__(self) -> None:
        self._log = [0.0] * _CENTRES

    def factor(self, expected: float) -> float:
        """Return the factor for an expected value in ns."""
        index, share = _place(expected)
        low = self._log[index]
        return math.exp(low + (self._log[index + 1] - low) * share)

    def observe(self, measured: float, expected: float) -> None:
        """Take one pair, both positive; `expected` is without the factor."""
        index, share = _place(expected)
        error = math.log(measured / (expected * self.factor(expected)))
        error = min(max(error, -self._CLIP), self._CLIP) * self._SHARE
        for i, weight in ((index, 1 - share), (index + 1, share)):
            moved = self._log[i] + weight * error
            self._log[i] = min(max(moved, -self._BOUND), self._BOUND)


def _place(expected: float) -> tuple[int, float]:
    """Return the centre at or below, and how far it is to the next, 0 to 1."""
    if expected <= _LOWEST:
        return 0, 0.0
    place = math.log(expected / _LOWEST) / _STEP
    index = int(place)
    return (index, place - index) if index < _CENTRES - 1 else (_CENTRES - 2, 1.0)


class RecentMedian:
    """Median of the latest ratios; 1 until there are enough to tell."""

    def __init__(self, count: int) -> None:
        self._ratios: deque[float] = deque(maxlen=count)

    def observe(self, ratio: float) -> None:
        """Take one ratio, positive."""
        self._ratios.append(ratio)

    @property
    def value(self) -> float:
        """The median."""
        ratios = self._ratios
        return median(ratios) if len(ratios) == ratios.maxlen else 1.0


class Correction:
    """``Drift`` and ``SizeBias`` of one kind of time, each learning what the other leaves."""

    def __init__(self) -> None:
        self._drift = Drift()
        self._bias = SizeBias()
        self._raw = RecentMedian(_TELLING)

    @property
    def factor(self) -> float:
        """Slowness of the machine now, over all sizes, as a factor."""
        return self._drift.factor

    @property
    def disagreement(self) -> float:
        """Median of measured ÷ expected, uncorrected; 1 until there are enough."""
        return self._raw.value

    def at(self, expected: float) -> float:
        """Return the corrected value, which rises with `expected`."""
        return expected * self._bias.factor(expected) * self._drift.factor

    def observe(self, measured: float, expected: float, beside: float = 1.0) -> None:
        """Take one pair, both positive; `expected` is uncorrected.

        `beside`: what other runs did to it, which says nothing of its size.
        """
        biased = expected * self._bias.factor(expected)
        if beside == 1.0:
            self._raw.observe(measured / expected)
            self._bias.observe(measured, expected * self._drift.factor)
        self._drift.observe(measured, biased * beside)


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
