"""Slowdown: the arithmetic of runs on one device that slow one another.

Beside k others a run takes `slowdown[k]` times as long as alone; beside more others than the table
holds, its last value counts. All runs that execute advance alike.
"""

from collections.abc import Sequence

#: A slowdown table for runs that do not slow one another.
NO_SLOWDOWN = (1.0,)


def check_slowdown(slowdown: Sequence[float]) -> None:
    """Raise ValueError unless it starts at 1 and never falls."""
    if not slowdown or slowdown[0] != 1.0 or list(slowdown) != sorted(slowdown):
        raise ValueError(f"slowdown must start at 1 and never fall, got {list(slowdown)}")


def slowdown_beside(slowdown: Sequence[float], others: int) -> float:
    """Return the slowdown of a run beside `others` other runs."""
    return slowdown[others] if others < len(slowdown) else slowdown[-1]


def ends_ns(left_ns: Sequence[float], slowdown: Sequence[float]) -> list[float]:
    """Return when each run ends, in ns from now, if they co-run and no other joins.

    `left_ns`: time alone that each still needs, ascending.
    """
    end_ns, done_ns, ends = 0.0, 0.0, []
    for others, need_ns in zip(range(len(left_ns) - 1, -1, -1), left_ns, strict=True):
        end_ns += (need_ns - done_ns) * slowdown_beside(slowdown, others)
        done_ns = need_ns
        ends.append(end_ns)
    return ends
