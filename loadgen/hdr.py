"""Latencies as a percentile distribution in the text format of HdrHistogram, for its plotters."""

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, pstdev

from loadgen.measure import Sample
from serve.errors import ConfigError

#: Percentiles that are written for each halving of the distance to 100 %.
_TICKS = 5


def write_hdr(path: Path, samples: Iterable[Sample]) -> None:
    """Write the latencies of all answers in ms, from when each request was due.

    Raises ConfigError when the file cannot be written.
    """
    latencies_ms = sorted(one.latency_ns / 1e6 for one in samples if one.answered)
    try:
        path.write_text(distribution_text(latencies_ms), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--hdr: {path}: {error.strerror}") from None


def distribution_text(ascending: list[float]) -> str:
    """Return the percentile distribution of values in ascending order."""
    count = len(ascending)
    lines = ["       Value     Percentile TotalCount 1/(1-Percentile)", ""]
    for share in _shares(count):
        rank = max(1, math.ceil(share * count - 1e-9))
        left = f" {1 / (1 - share):14.2f}" if share < 1 else ""
        lines.append(f"{ascending[rank - 1]:12.3f} {share:14.12f} {rank:10d}{left}")
    mean = fmean(ascending) if count else 0.0
    spread = pstdev(ascending) if count else 0.0
    most = ascending[-1] if count else 0.0
    lines += [
        f"#[Mean    = {mean:12.3f}, StdDeviation   = {spread:12.3f}]",
        f"#[Max     = {most:12.3f}, Total count    = {count:12d}]",
        f"#[Buckets = {0:12d}, SubBuckets     = {0:12d}]",
    ]
    return "\n".join(lines) + "\n"


def _shares(count: int) -> Iterable[float]:
    """Yield shares from 0 to 1, closer to each other towards 1, as far as so many values tell."""
    if not count:
        return
    left = 1.0
    while left * count > 1 / 2:
        for step in range(_TICKS):
            share = 1 - left * (1 - step / (2 * _TICKS))
            yield share
        left /= 2
    yield 1.0
