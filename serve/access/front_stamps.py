"""When a front got a request: a header that only those write who have the front's key.

Clients reach a server without its front too, so a time without the key says nothing.
"""

import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from serve.errors import ConfigError
from serve.files import read_named_text

#: Header with the key and the time, in microseconds since 1970.
ARRIVED = "gnnserve-arrived"
_KEY = re.compile(r"[A-Za-z0-9_-]{16,128}")
_MOST_FILE_BYTES = 4096
_MOST_DIGITS = 16
#: A request that is older was stamped by a clock that is wrong.
_MOST_NS = 3600 * 10**9


class FrontStamps:
    """Writes and reads the header."""

    def __init__(self, key: str) -> None:
        """`key` is what fronts and servers share."""
        self.key = key

    def value(self, arrived_unix_ns: int) -> str:
        """Return the header's value for a request that came then."""
        return f"{self.key} {arrived_unix_ns // 1000}"

    def front_ns(self, headers: Iterable[tuple[str, str | bytes]], unix_ns: int) -> int:
        """Return how long before `unix_ns` a front got a call with these headers.

        0 when none tells it, and when the clocks of the two machines contradict each other.
        """
        for name, value in headers:
            if name == ARRIVED and isinstance(value, str):
                key, _, digits = value.partition(" ")
                if not hmac.compare_digest(key.encode(), self.key.encode()):
                    return 0
                if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS):
                    return 0
                took_ns = unix_ns - 1000 * int(digits)
                return took_ns if 0 < took_ns <= _MOST_NS else 0
        return 0


def read_key(file: Path) -> str:
    """Return the key in a file; raises ConfigError."""
    key = read_named_text(file, _MOST_FILE_BYTES).strip()
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{file}: a front's key is 16 to 128 letters, digits, '_' and '-'")
    return key
