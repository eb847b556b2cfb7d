"""Measuring: ways that take turns, percentiles, spreads. Needs numpy alone."""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

_Found = TypeVar("_Found")


def in_turns(
    ways: Mapping[str, Callable[[], _Found]],
    rounds: int,
    *,
    warm_up: int = 1,
    least: int = 3,
    limit_s: float = math.inf,
) -> dict[str, list[_Found]]:
    """Call all ways in every round, in an order drawn anew, and return what each call returned.

    The results of one round are neighbours in time, so a drift of the machine's speed meets all
    ways alike, and with drawn orders so does what the way before left in the caches. The first
    `warm_up` rounds are not returned. After `limit_s` seconds no round begins, once there are
    `least`.
    """
    orders = random.Random(0)
    found: dict[str, list[_Found]] = {name: [] for name in ways}
    until = time.monotonic() + limit_s
    for number in range(-warm_up, rounds):
        if number >= least and time.monotonic() > until:
            break
        for name in orders.sample(list(ways), len(ways)):
            result = ways[name]()
            if number >= 0:
                found[name].append(result)
    return found


def elapsed_us(call: Callable[..., object], *arguments: Any, **named: Any) -> float:
    """Return the wall time of a call in microseconds."""
    started_ns = time.perf_counter_ns()
    call(*arguments, **named)
    return (time.perf_counter_ns() - started_ns) / 1e3


def percentiles(values: Any, percents: Sequence[int], digits: int = 1) -> dict[str, float]:
    """Return the percentiles of the values, interpolated, by name: `p50` and so on."""
    found = np.percentile(values, percents)
    return {f"p{q}": round(float(v), digits) for q, v in zip(percents, found, strict=True)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float], digits: int = 3) -> list[float]:
    """Return median, lowest and highest."""
    return [round(float(v), digits) for v in (np.median(values), min(values), max(values))]


def quartiles(values: Sequence[float], digits: int = 3) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return [round(float(v), digits) for v in np.percentile(values, (25, 50, 75))]


def median_interval(values: Any, digits: int = 3) -> list[float]:
    """Return the median, and the ends of a 95 % bootstrap interval of it."""
    picks = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(picks, axis=1), (2.5, 97.5))
    return [round(float(value), digits) for value in (np.median(values), low, high)]
