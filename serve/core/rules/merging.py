"""Merging: which waiting tasks join a launch, as one disjoint union on its lane.

A union saves what a run costs whatever its size, and loses where a larger graph no longer fits the
caches; so tasks are merged by predicted time, never blindly. A waiting task of the same model joins
when all of this holds:

- It would have to wait otherwise: what is ready is shared out over all free slots first.
- Together they take clearly less time than one after the other, launches included.
- Whoever is on time stays on time: members, which are all answered at the union's end, and others
  that wait, which wait for all of it.
- The memory of the union, which it is reserved as a whole, is free, and a run of the model may
  take it.

Time limits count the server's own share of the solo time as still to come, and that those which
execute slow the union.
"""

from collections.abc import Iterator, Sequence
from math import ceil, inf

from serve.core.lifecycle import State
from serve.core.slowdown import slowdown_beside
from serve.core.state.device_state import Board
from serve.core.state.record import Record
from serve.core.types import Nanos, TaskEstimate, UnionEstimate

#: Share of its own run time that a task must save to join: predictions are not exact.
LEAST_SAVED = 0.1


def gather(
    leader: Record,
    board: Board,
    estimate: UnionEstimate,
    now_ns: Nanos,
    *,
    most: int,
    own_group: bool,
) -> tuple[tuple[Record, ...], TaskEstimate]:
    """Return the READY leader with the tasks that join it, and the estimate of their union.

    At most `most` tasks. With `own_group`, only tasks of the leader's group join.
    """
    task = leader.task
    chosen, together = [leader], task.estimate
    if leader.alone or leader.apart or task.block is not None:
        return (leader,), together
    found = _candidates(leader, board, own_group)
    most = min(most, ceil((1 + len(found)) / max(1, board.free_slots)))
    if most < 2 or not found:
        return (leader,), together
    limit_ns = min(_latest_end_ns(leader, now_ns), _others_ns(leader, found, board, now_ns))
    slowdown = slowdown_beside(board.slowdown, board.executing_count)
    sizes = [task.counted]
    for record in found:
        if len(chosen) == most:
            break
        other = record.task
        sizes.append(other.counted)
        union = estimate(other.model, sizes)
        if union is None:
            break
        own_ns = other.estimate.run_ns
        end_ns = _latest_end_ns(record, now_ns)
        if (
            union.run_ns <= together.run_ns + (1 - LEAST_SAVED) * own_ns + board.launch_ns
            and union.run_ns * slowdown <= min(limit_ns, end_ns)
            and union.reserve_bytes <= task.most_bytes(board.available_bytes)
        ):
            chosen.append(record)
            together, limit_ns = union, min(limit_ns, end_ns)
        else:
            sizes.pop()
            # It goes on waiting, and those that still may join must not make it late.
            if end_ns - own_ns >= together.run_ns * slowdown:
                limit_ns = min(limit_ns, end_ns - own_ns)
    return tuple(chosen), together


def _candidates(leader: Record, board: Board, own_group: bool) -> list[Record]:
    """Return READY tasks of the leader's model that may be merged, in plan order."""
    groups = board.plan.groups
    if own_group and leader.group is not None:
        groups = [leader.group]
    model = leader.task.model
    return [
        record
        for group in groups
        for record in group.members
        if record.state is State.READY
        and record.task.model == model
        and record is not leader
        and not record.alone
        and not record.apart
        and record.task.block is None
    ]


def _latest_end_ns(record: Record, now_ns: Nanos) -> float:
    """Return how long a run of the record may take from now; infinite when it is late anyway."""
    task = record.task
    estimate = task.estimate
    left_ns = task.due_ns - now_ns
    if left_ns < estimate.run_ns:
        return inf
    return left_ns - (estimate.solo_ns - estimate.run_ns)


def _others_ns(leader: Record, found: Sequence[Record], board: Board, now_ns: Nanos) -> float:
    """Return how long those can wait at most that wait for the leader and do not join it."""
    own_ns = leader.task.estimate.run_ns
    spares = _spares_ns(leader, found, board, now_ns)
    return min((spare_ns for spare_ns in spares if spare_ns >= own_ns), default=inf)


def _spares_ns(
    leader: Record, found: Sequence[Record], board: Board, now_ns: Nanos
) -> Iterator[float]:
    joining = {id(record) for record in found}
    joining.add(id(leader))
    for group in board.plan.groups:
        for record in group.members:
            if id(record) not in joining:
                yield _latest_end_ns(record, now_ns) - record.task.estimate.run_ns
    for run in board.busy.values():
        if not run.executing:
            left_ns = board.left_ns(run, now_ns)
            for record in run.members:
                if not record.state.answered:
                    yield record.task.due_ns - now_ns - left_ns
