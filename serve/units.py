"""Sizes and durations as people read and write them."""

import math
import re

from serve.errors import ConfigError

_BYTES = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
#: Sizes have 63 bits in calls of the system.
_MOST_BYTES = 2**63
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str, key: str) -> int:
    """Return the number of bytes in a size such as `"4 GiB"`, `"512MB"` or `"1048576"`.

    Raises ConfigError, which names `key`, when `text` is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = (match[2].upper() or "B") if match else ""
    if match is None or unit not in _BYTES:
        raise ConfigError(f"{key}: {text!r} is not a size; write a number and a unit: '4 GiB'")
    size_bytes = float(match[1]) * _BYTES[unit]
    if size_bytes < 1:
        raise ConfigError(f"{key}: {text!r} must be more than 0 bytes")
    if size_bytes >= _MOST_BYTES:
        raise ConfigError(f"{key}: {text!r} must be less than {_MOST_BYTES // 2**40} TiB")
    return int(size_bytes)


def parse_duration(text: str, key: str) -> float:
    """Return the seconds in `"90s"`, `"15m"`, `"1.5h"` or `"7d"`.

    A number without a unit is none: 30 may be meant as days. Raises ConfigError, which names `key`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"{key}: {text!r} is not a duration; write a number and a unit: '90s', '15m', '30d'"
        )
    return seconds


def format_seconds(seconds: float) -> str:
    """Format a duration: `850 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_ms(milliseconds: float) -> str:
    """Format a latency to three figures: `0.42 ms`, `12.3 ms`, `1.2 s`."""
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s"
    return f"{milliseconds:.3g} ms"


def format_bytes(size_bytes: float) -> str:
    """Format a size to three figures: `512 KiB`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"
