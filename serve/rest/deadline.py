"""The header ``Grpc-Timeout``: the time within which a client wants its answer."""

import re

from serve.rest.errors import invalid

HEADER = "Grpc-Timeout"
_MOST_S = 1e9
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def parse_timeout(text: str | None) -> float | None:
    """Return the seconds of a value such as `250m` or `2S`. Raises RestError.

    None without one, and for one of decades, beyond what gRPC can add to the time of day.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,8})([HMSmun])", text)
    if match is None:
        raise invalid(
            f"{HEADER}: {text[:32]!r} is no time limit; write a whole number and a unit: "
            "H, M, S, m (ms), u (µs) or n (ns)"
        )
    limit_s = int(match[1]) * _UNITS_S[match[2]]
    return limit_s if limit_s < _MOST_S else None
