"""How runs on one device slow one another: the arithmetic of it.

Beside k others a run takes `slowdown[k]` times as long as alone; beside more than the table knows,
as long as beside the last. All that execute advance alike.
"""

from collections.abc import Sequence

#: By number of others that execute: none disturbs another.
NO_SLOWDOWN = (1.0,)


def check_slowdown(slowdown: Sequence[float]) -> None:
    """Raise ValueError unless it starts at 1 and never falls."""
    if not slowdown or slowdown[0] != 1.0 or list(slowdown) != sorted(slowdown):
        raise ValueError(f"slowdown must start at 1 and never fall, got {list(slowdown)}")


def slowdown_beside(slowdown: Sequence[float], others: int) -> float:
    """The slowdown of a run with so many others beside it."""
    return slowdown[others] if others < len(slowdown) else slowdown[-1]


def ends_ns(left_ns: Sequence[float], slowdown: Sequence[float]) -> list[float]:
    """When each of some runs ends, from now, if they execute together and no other joins.

    `left_ns`: time alone that each still needs, ascending.
    """
    end_ns, done_ns, ends = 0.0, 0.0, []
    for others, need_ns in zip(range(len(left_ns) - 1, -1, -1), left_ns, strict=True):
        end_ns += (need_ns - done_ns) * slowdown_beside(slowdown, others)
        done_ns = need_ns
        ends.append(end_ns)
    return ends
