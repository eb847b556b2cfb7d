"""Operator matching: which operators of several tasks on one graph one kernel can do together.

After TurboMGNN (Wu et al. 2023, section III-D), made precise. A task is a program: a DAG of
operators in topological order. Operators of equal kind are *fusable*: one kernel reads the edges
once for all of them. Matching goes by rounds. A task's frontier are its fusable operators whose
fusable ancestors are all done. Each round takes one kind, and of every task all operators of that
kind on the frontier; these become one operator, whose inputs are those of its members.

The merged graph has no cycle. All fusable ancestors of a member were done in earlier rounds, so
every path between fused operators leads from an earlier round to a later one. A path within one
round is impossible, as a frontier holds no operator and its ancestor.

Rounds are greedy, in two ways of which the shorter counts: the kind with most members, of equals
the one nearest to the beginning; or the kind behind which most rounds are still to come, of equals
the one with most members. For one kind both give as few operators as there can be, the longest
chain. Two chains of several kinds are merged as their shortest common supersequence, the fewest
possible.

The server does not fuse operators of several tasks today: this decides what could be fused.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import msgspec

#: Most pairs of operators for which a shortest common supersequence is looked for.
_MOST_PAIRS = 1_000_000
#: Tasks less alike than this are not fused.
LEAST_ALIKE = 0.7
#: Fused operators with more members take more registers than they save reads (the paper's Fig. 5).
MOST_FUSED = 4


class Operator(msgspec.Struct, frozen=True):
    """One operator of a task."""

    #: Operators of one kind can be fused; empty: it is never fused.
    kind: str = ""
    #: Places, within the task, of the earlier operators whose results it takes.
    after: tuple[int, ...] = ()


#: The operators of a task in topological order.
Program = Sequence[Operator]
#: A task and a place in its program.
Member = tuple[int, int]
#: An operator of the merged graph: the number of a fused one, or an operator left as it was.
Node = int | Member


def chain(kinds: Iterable[str], times: int = 1) -> list[Operator]:
    """Return a program in which each operator takes the result of the one before."""
    all_kinds = list(kinds) * times
    return [Operator(kind, (place - 1,) if place else ()) for place, kind in enumerate(all_kinds)]


def match(programs: Sequence[Program], most: int | None = None) -> list[tuple[Member, ...]]:
    """Return the fused operators, in an order in which they can run, by their members.

    Every fusable operator is a member of exactly one, at most `most` of each. Raises ValueError for
    an operator that takes the result of itself or of a later one.
    """
    tasks = [_Progress(program) for program in programs]
    order = _supersequence(tasks) or min(
        (_greedy(programs, rank) for rank in (_most_members, _most_to_come)), key=len
    )
    found: list[tuple[Member, ...]] = []
    for kind in order:
        members = [
            (number, place) for number, task in enumerate(tasks) for place in task.take(kind)
        ]
        step = most or len(members)
        found += [tuple(members[at : at + step]) for at in range(0, len(members), step)]
    return found


def merged(
    programs: Sequence[Program], fused: Sequence[tuple[Member, ...]]
) -> dict[Node, set[Node]]:
    """Return the merged graph: of each operator those whose results it takes."""
    node_of: dict[Member, Node] = {
        member: number for number, members in enumerate(fused) for member in members
    }
    graph: dict[Node, set[Node]] = {number: set() for number in range(len(fused))}
    for number, program in enumerate(programs):
        for place, operator in enumerate(program):
            taken = graph.setdefault(node_of.get((number, place), (number, place)), set())
            taken |= {node_of.get((number, before), (number, before)) for before in operator.after}
    return graph


def ends(fused: Sequence[tuple[Member, ...]], count: int) -> list[int]:
    """Return after how many fused operators each of `count` tasks has done all of its own."""
    last = [0] * count
    for number, members in enumerate(fused, 1):
        for task, _ in members:
            last[task] = number
    return last


def similarity(one: Program, other: Program) -> float:
    """Return how much of the fusable operators two tasks have in common, in order: 0 to 1."""
    kinds = [[op.kind for op in program if op.kind] for program in (one, other)]
    total = len(kinds[0]) + len(kinds[1])
    return 2 * _common(*kinds)[0][0] / total if total else 1.0


def grouped(
    programs: Sequence[Program], least_alike: float = LEAST_ALIKE, most: int = MOST_FUSED
) -> list[tuple[int, ...]]:
    """Return the tasks in groups to be fused: at most `most` each, every two of them alike.

    The two groups most alike are joined, by the two of their tasks that are least alike, until none
    are alike enough.
    """
    alike = {
        (a, b): similarity(programs[a], programs[b])
        for a, b in combinations(range(len(programs)), 2)
    }
    groups: list[tuple[int, ...]] = [(number,) for number in range(len(programs))]

    def least(one: tuple[int, ...], other: tuple[int, ...]) -> float:
        return min(alike[min(a, b), max(a, b)] for a in one for b in other)

    while True:
        pairs = [
            (-least(one, other), one, other)
            for one, other in combinations(groups, 2)
            if len(one) + len(other) <= most
        ]
        if not pairs or -(best := min(pairs))[0] < least_alike:
            return sorted(groups)
        _, one, other = best
        groups = [group for group in groups if group not in (one, other)]
        groups.append(tuple(sorted((*one, *other))))


class _Progress:
    """Fusable operators of a task that are done, and those that could be next."""

    def __init__(self, program: Program) -> None:
        #: Nearest fusable operators at or above each place.
        nearest: list[frozenset[int]] = []
        self._open: dict[int, int] = {}
        self._behind: dict[int, list[int]] = {}
        #: Length of the longest chain of fusable operators before each.
        self._depth: dict[int, int] = {}
        self._kinds = [operator.kind for operator in program]
        for place, operator in enumerate(program):
            if any(not 0 <= before < place for before in operator.after):
                raise ValueError(
                    f"operator {place} takes results of {operator.after}, and may only of 0 to "
                    f"{place - 1}"
                )
            above = frozenset().union(*(nearest[before] for before in operator.after))
            nearest.append(frozenset((place,)) if operator.kind else above)
            if operator.kind:
                self._open[place] = len(above)
                self._depth[place] = 1 + max((self._depth[a] for a in above), default=-1)
                for before in above:
                    self._behind.setdefault(before, []).append(place)
        #: Length of the longest chain behind each.
        self._to_come = dict.fromkeys(self._open, 0)
        for place in reversed(self._open):
            behind = self._behind.get(place, ())
            self._to_come[place] = max((1 + self._to_come[b] for b in behind), default=0)
        #: By kind, operators whose fusable ancestors are all done.
        self.frontier: dict[str, list[int]] = {}
        for place, count in self._open.items():
            if count == 0:
                self._reach(place)

    @property
    def fusable(self) -> list[str]:
        """Kinds of the fusable operators, in order."""
        return [self._kinds[place] for place in self._open]

    @property
    def is_chain(self) -> bool:
        """True when each fusable operator waits for the one before."""
        return sorted(self._depth.values()) == list(range(len(self._depth)))

    def depth(self, kind: str) -> int:
        """Return how far from the beginning the nearest operator of a kind on the frontier is."""
        return min(self._depth[place] for place in self.frontier[kind])

    def to_come(self, kind: str) -> int:
        """Return the length of the longest chain behind one of a kind on the frontier."""
        return max(self._to_come[place] for place in self.frontier[kind])

    def take(self, kind: str) -> list[int]:
        """Do all operators of a kind on the frontier, and return their places."""
        taken = self.frontier.pop(kind, [])
        for place in taken:
            for behind in self._behind.get(place, ()):
                self._open[behind] -= 1
                if self._open[behind] == 0:
                    self._reach(behind)
        return taken

    def _reach(self, place: int) -> None:
        self.frontier.setdefault(self._kinds[place], []).append(place)


Rank = Callable[[Sequence[_Progress], str], tuple[int, ...]]


def _greedy(programs: Sequence[Program], rank: Rank) -> list[str]:
    """Return the kind of each round: on every frontier that of the smallest rank."""
    tasks = [_Progress(program) for program in programs]
    order = []
    while kinds := {kind for task in tasks for kind in task.frontier}:
        kind = min(
            kinds,
            key=lambda kind: (rank([task for task in tasks if kind in task.frontier], kind), kind),
        )
        for task in tasks:
            task.take(kind)
        order.append(kind)
    return order


def _most_members(holders: Sequence[_Progress], kind: str) -> tuple[int, ...]:
    members = sum(len(task.frontier[kind]) for task in holders)
    return -members, min(task.depth(kind) for task in holders)


def _most_to_come(holders: Sequence[_Progress], kind: str) -> tuple[int, ...]:
    members = sum(len(task.frontier[kind]) for task in holders)
    return -max(task.to_come(kind) for task in holders), -members


def _supersequence(tasks: Sequence[_Progress]) -> list[str]:
    """Return the shortest common supersequence of two chains; nothing where that does not apply."""
    if len(tasks) != 2 or not all(task.is_chain for task in tasks):
        return []
    one, other = (task.fusable for task in tasks)
    if len(set(one) | set(other)) < 2 or len(one) * len(other) > _MOST_PAIRS:
        return []
    common = _common(one, other)
    order, a, b = [], 0, 0
    while a < len(one) and b < len(other):
        if one[a] == other[b]:
            order.append(one[a])
            a, b = a + 1, b + 1
        elif common[a + 1][b] >= common[a][b + 1]:
            order.append(one[a])
            a += 1
        else:
            order.append(other[b])
            b += 1
    return [*order, *one[a:], *other[b:]]


def _common(one: Sequence[str], other: Sequence[str]) -> list[list[int]]:
    """Return the lengths of the longest common subsequences of what is left from each place on."""
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for a in range(len(one) - 1, -1, -1):
        below, row = lengths[a + 1], lengths[a]
        for b in range(len(other) - 1, -1, -1):
            row[b] = below[b + 1] + 1 if one[a] == other[b] else max(below[b], row[b + 1])
    return lengths
