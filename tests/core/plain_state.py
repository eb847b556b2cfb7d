"""All that a scheduler is made of, as plain values, so that two of them can be compared."""

import enum
from collections import deque

import msgspec

#: Attributes that mean nothing while the window is closed.
IGNORED = {"_tightest_ns"}


def state_of(root):
    """Return everything that `root` refers to as plain values; objects seen before by number."""
    numbers = {}

    def plain(value):
        if isinstance(value, int | float | str | None | enum.Enum | type):
            return value
        if callable(value):
            return None
        if isinstance(value, dict):
            return [(plain(key), plain(held)) for key, held in value.items()]
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, list | tuple | deque):
            return [plain(held) for held in value]
        if id(value) in numbers:
            return numbers[id(value)]
        numbers[id(value)] = len(numbers)
        if isinstance(value, msgspec.Struct):
            names = value.__struct_fields__
        else:
            names = getattr(value, "__slots__", None) or getattr(value, "__dict__", ())
        return [(name, plain(getattr(value, name))) for name in names if name not in IGNORED]

    return plain(root)
