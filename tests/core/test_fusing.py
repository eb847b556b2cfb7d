"""Operators of several tasks are matched without a cycle, and in few enough rounds."""

from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain as joined
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.rules.fusing import Operator, chain, ends, grouped, match, merged, similarity


@st.composite
def programs(draw, most_tasks=4, most_operators=12, kinds=("", "a", "b")):
    """Tasks of random DAGs."""
    count = draw(st.integers(1, most_tasks))
    found = []
    for _ in range(count):
        length = draw(st.integers(0, most_operators))
        found.append([
            Operator(
                draw(st.sampled_from(kinds)),
                tuple(sorted(draw(st.sets(st.integers(0, place - 1), max_size=3))))
                if place
                else (),
            )
            for place in range(length)
        ])  # fmt: skip
    return found


kinds_in_order = st.lists(st.sampled_from("abc"), max_size=6)


def ancestors(program):
    """The places of all operators above each."""
    found = []
    for operator in program:
        found.append(frozenset(operator.after).union(*(found[b] for b in operator.after)))
    return found


@given(programs(), st.none() | st.integers(1, 3))
def test_the_merged_graph_has_no_cycle_and_keeps_each_task_in_order(tasks, most):
    fused = match(tasks, most)
    order = list(TopologicalSorter(merged(tasks, fused)).static_order())
    at = {node: place for place, node in enumerate(order)}
    node_of = {member: number for number, members in enumerate(fused) for member in members}
    for number, program in enumerate(tasks):
        for place, above in enumerate(ancestors(program)):
            mine = at[node_of.get((number, place), (number, place))]
            assert all(at[node_of.get((number, a), (number, a))] < mine for a in above)
    # They also can run in the order in which they are given.
    for number, members in enumerate(fused):
        for task, place in members:
            fusable_above = {(task, a) for a in ancestors(tasks[task])[place]} & node_of.keys()
            assert all(node_of[above] < number for above in fusable_above)


@given(programs(), st.none() | st.integers(1, 3))
def test_every_fusable_operator_is_fused_once_with_others_of_its_kind(tasks, most):
    fused = match(tasks, most)
    assert Counter(joined.from_iterable(fused)) == Counter(
        (number, place)
        for number, program in enumerate(tasks)
        for place, operator in enumerate(program)
        if operator.kind
    )
    for members in fused:
        assert 1 <= len(members) <= (most or len(members))
        assert len({tasks[task][place].kind for task, place in members}) == 1


def test_a_matching_that_crosses_has_a_cycle():
    # What the rounds prevent: the first of one with the second of the other, both ways.
    tasks = [chain("ab"), chain("ba")]
    crossed = [((0, 0), (1, 1)), ((0, 1), (1, 0))]
    with pytest.raises(CycleError):
        TopologicalSorter(merged(tasks, crossed)).prepare()


def fewest(tasks):
    """Return the fewest fused operators, by trying every set of members in every order."""
    above = [ancestors(program) for program in tasks]
    everything = frozenset(
        (t, p) for t, program in enumerate(tasks) for p, op in enumerate(program) if op.kind
    )

    @cache
    def left(done):
        if done == everything:
            return 0
        ready = {}
        for task, place in everything - done:
            if all((task, a) in done for a in above[task][place] if tasks[task][a].kind):
                ready.setdefault(tasks[task][place].kind, []).append((task, place))
        return 1 + min(
            left(done | frozenset(chosen))
            for its in ready.values()
            for size in range(1, len(its) + 1)
            for chosen in combinations(its, size)
        )

    return left(frozenset())


@given(programs(most_tasks=3, most_operators=4))
def test_rounds_are_no_fewer_than_possible_and_few(tasks):
    least = fewest(tasks)
    assert least <= len(match(tasks)) <= 2 * least


@given(programs(most_tasks=3, most_operators=4, kinds=("", "a")))
def test_of_one_kind_no_matching_is_shorter(tasks):
    assert len(match(tasks)) == fewest(tasks)


@given(kinds_in_order, kinds_in_order)
def test_two_chains_become_their_shortest_common_supersequence(one, other):
    @cache
    def shortest(a, b):
        if a == len(one) or b == len(other):
            return len(one) - a + len(other) - b
        if one[a] == other[b]:
            return 1 + shortest(a + 1, b + 1)
        return 1 + min(shortest(a + 1, b), shortest(a, b + 1))

    assert len(match([chain(one), chain(other)])) == shortest(0, 0)


def kinds_of(tasks):
    return "".join(tasks[members[0][0]][members[0][1]].kind for members in match(tasks))


def test_a_kind_with_most_members_or_with_most_to_come_goes_first():
    assert kinds_of([chain("ab"), chain("ba"), chain("ba")]) == "bab"
    # Most members first would be a, a, then the third task alone: six rounds.
    assert kinds_of([chain("aa"), chain("aa"), chain("baba")]) == "baba"


def test_operators_between_are_left_as_they_are():
    # A product between two aggregations of each task.
    task = [Operator("spmm"), Operator("", (0,)), Operator("spmm", (1,))]
    fused = match([task, task])
    assert fused == [((0, 0), (1, 0)), ((0, 2), (1, 2))]
    assert merged([task, task], fused)[1] == {(0, 1), (1, 1)}
    assert ends(fused, 2) == [2, 2]


def test_an_operator_takes_results_of_earlier_ones_only():
    with pytest.raises(ValueError, match="operator 1 takes results of"):
        match([[Operator("a"), Operator("a", (1,))]])


def test_alike_tasks_are_grouped():
    shallow, deep, other = chain("aaaa"), chain("aaaaaa"), chain("bcbc")
    assert similarity(shallow, shallow) == 1.0
    assert similarity(shallow, deep) == pytest.approx(0.8)
    assert similarity(shallow, other) == 0.0
    assert similarity([], []) == 1.0
    assert grouped([shallow, other, deep, other]) == [(0, 2), (1, 3)]
    assert grouped([shallow] * 6, most=4) == [(0, 1, 2, 3), (4, 5)]
    assert grouped([shallow, deep], least_alike=0.9) == [(0,), (1,)]
