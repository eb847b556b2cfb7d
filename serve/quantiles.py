"""Quantiles, by one definition everywhere: linear interpolation between the nearest ranks.

The default of NumPy and R, definition 7 in Hyndman and Fan, "Sample Quantiles in Statistical
Packages", The American Statistician 50(4), 1996.
"""

from collections.abc import Iterable, Sequence


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile at `share`, 0 to 1, of ascending values; 0.0 when there are none."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"a quantile's share must be between 0 and 1, got {share}")
    if not ordered:
        return 0.0
    rank = share * (len(ordered) - 1)
    below = int(rank)
    low = ordered[below]
    if below == rank:
        return float(low)
    return float(low + (ordered[below + 1] - low) * (rank - below))


def quantiles(values: Iterable[float], shares: Sequence[float]) -> tuple[float, ...]:
    """Return the quantile at each of `shares` of values in any order."""
    ordered = sorted(values)
    return tuple(quantile(ordered, share) for share in shares)
