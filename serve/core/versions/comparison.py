"""When what is on trial does clearly worse than what it may replace.

Two shares are compared: of requests that failed, and of those that were late. One side does worse
when the lower bound of its share lies above the upper bound of the other's: Wilson's intervals of
`Z` = 3 standard deviations, so wide that looking after every request makes few false alarms.
"""

from typing import NamedTuple

from serve.wilson import wilson_interval

#: Ends of each side before anything is decided.
LEAST = 30
#: Half width of the intervals, in standard deviations.
Z = 3.0


class Ends(NamedTuple):
    """How the requests of one side ended."""

    ended: int = 0
    #: Answered after their target, or not within their own limit.
    late: int = 0
    #: Without an answer for a reason that lies in what is on trial.
    failed: int = 0


def worse(own: Ends, others: Ends, whose: str) -> str:
    """Return why `own` does clearly worse, with the numbers; empty when it does not.

    `whose` names the others: "the other versions'".
    """
    if min(own.ended, others.ended) < LEAST:
        return ""
    for what, mine, theirs in (
        ("failed", own.failed, others.failed),
        ("were late", own.late, others.late),
    ):
        low, _ = wilson_interval(mine, own.ended, Z)
        _, high = wilson_interval(theirs, others.ended, Z)
        if low > high:
            return (
                f"{mine} of its last {own.ended} requests {what} (at least {low:.1%}), "
                f"{theirs} of {others.ended} of {whose} (at most {high:.1%})"
            )
    return ""
