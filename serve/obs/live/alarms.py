"""Sentences about what needs an operator's attention."""

from collections.abc import Mapping, Sequence
from typing import Any

from serve.obs.explanations import CAUSES
from serve.obs.record import ServerRun

#: Share of late answers that is worth a sentence, as for the alerts of ``docs/operators.md``.
_LATE = 0.01
#: Share of the budget from which on memory is short.
_FULL = 0.95
#: Time without an answer while requests wait.
_STUCK_S = 10


def alarms_of(
    total: Any,
    causes: Mapping[str, int],
    run: ServerRun | None,
    state: Mapping[str, int] | None,
    points: Sequence[Any],
) -> list[str]:
    """Return a sentence for each thing that is wrong; none for a server that does well.

    Args:
        total: Totals of the window.
        causes: Late answers by cause.
        run: The server's run.
        state: Its last state; None when it told none.
        points: Points of the window.
    """
    found = []
    if total.answered and total.interval[0] > _LATE:
        cause = max(causes, key=lambda name: causes[name])
        what, remedy = CAUSES.get(cause, ("", ""))
        found.append(
            f"{total.late / total.answered:.1%} of the answers were late, most often because of "
            f"{cause}: they {_plural(what)}. Try first: {remedy}."
            if what
            else f"{total.late / total.answered:.1%} of the answers were late."
        )
    if run is not None and state is not None:
        started = run.lanes_started or run.lanes
        if state["lanes_up"] < started:
            found.append(f"{state['lanes_up']} of {started} lanes can take a task.")
        if run.budget_bytes and state["reserved_bytes"] > _FULL * run.budget_bytes:
            share = state["reserved_bytes"] / run.budget_bytes
            found.append(f"Running tasks reserve {share:.0%} of the memory budget; others wait.")
        last = [point for point in points if point.start_s >= points[-1].start_s - _STUCK_S]
        if state["queue"] and len(last) > _STUCK_S and not any(point.answered for point in last):
            found.append(f"{state['queue']} requests wait, and none was answered for {_STUCK_S} s.")
    if run is not None and run.rows_lost:
        found.append(
            f"{run.rows_lost:,} rows are missing, because the database could not take them."
        )
    return found


def _plural(what: str) -> str:
    """Return what happened to a late answer as what happened to several."""
    return what.replace(" its ", " their ").replace("was suspended", "were suspended")
