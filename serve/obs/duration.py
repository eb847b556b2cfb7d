"""Durations as people write them."""

import re

from serve.errors import ConfigError

_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Seconds in `"90"`, `"90s"`, `"15m"`, `"1.5h"` or `"7d"`; raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)\s*", text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(f"{text!r} is not a duration; write a number and a unit: '15m', '2h'")
    return seconds


def format_seconds(seconds: float) -> str:
    """`850 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
