import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serve.estimate.calibration import Linear, terms
from serve.estimate.memory import (
    MemoryTrace,
    covers,
    fit_curve,
    fit_held,
    fit_planes,
    peak_at,
    upper_hull,
)

SIZES = ((60, 150), (60, 600), (90, 150), (130, 900), (200, 400), (60, 40), (200, 120))

coefficients = st.integers(0, 4096)
planes = st.builds(Linear, st.tuples(coefficients, coefficients), st.integers(0, 10**6))
graph_sizes = st.tuples(st.integers(0, 10**6), st.integers(0, 10**8))


@st.composite
def programs(draw):
    """A forward pass: blocks of a·N + b·E + c bytes, each allocated once and freed once."""
    blocks = draw(st.lists(st.tuples(coefficients, coefficients, st.integers(64, 999)), max_size=9))
    order = draw(st.permutations([i for i in range(len(blocks)) for _ in range(2)]))
    seen = set()
    moves = []
    for i in order:
        moves.append((i, i not in seen))
        seen.add(i)
    return blocks, moves


def run(program, nodes, edges, noise=lambda: 0):
    blocks, moves = program
    bytes_of = [a * nodes + b * edges + c + noise() for a, b, c in blocks]
    return MemoryTrace(
        (nodes, edges),
        tuple(bytes_of[i] if grows else -bytes_of[i] for i, grows in moves),
        tuple(f"layer{i}" for i, _ in moves),
    )


@given(st.lists(planes, min_size=1, max_size=12), graph_sizes)
def test_the_hull_is_the_maximum_of_all_planes(planes, size):
    hull = upper_hull(planes)
    assert set(hull) <= set(planes)
    assert peak_at(hull, *size) == pytest.approx(max(p.at(*size) for p in planes), rel=1e-8)


@given(st.lists(planes, min_size=2, max_size=8))
def test_every_plane_kept_is_needed_somewhere(planes):
    hull = upper_hull(planes)
    assume(len(hull) > 1)
    rng = np.random.default_rng(0)
    directions = rng.dirichlet([0.3, 0.3, 0.3], 20_000)
    directions[:3] = np.eye(3)
    heights = directions @ np.array([(*p.per, p.constant) for p in hull]).T
    # Slivers may be missed by sampling: each plane must only come close to the top somewhere.
    gap = (heights.max(axis=1, keepdims=True) - heights).min(axis=0)
    assert (gap <= 0.02 * heights.max()).all()


def test_planes_that_never_decide_are_dropped():
    low, high = Linear((1, 1), 1), Linear((2, 2), 2)
    # Below the mean of the two others everywhere, though below neither one everywhere.
    between = Linear((4, 4), 0)
    ends = Linear((10, 0), 1), Linear((0, 10), 1)
    assert upper_hull([low, high]) == (high,)
    assert set(upper_hull([*ends, between])) == set(ends)
    twins = [Linear((2, 2), 2, f"layer {i}") for i in range(9)]
    assert len(upper_hull(twins)) == 1
    assert upper_hull(twins) == upper_hull(reversed(twins))


@given(programs(), st.tuples(st.integers(1, 10**5), st.integers(0, 10**6)))
def test_the_peak_of_any_program_is_found_exactly(program, size):
    hull, problem = fit_planes([run(program, *s) for s in SIZES])
    assert problem == ""
    exact = run(program, *size).peak_bytes
    assert peak_at(hull, *size) == pytest.approx(exact, rel=1e-6, abs=2)


@given(programs(), st.tuples(st.integers(1, 10**5), st.integers(0, 10**6)), st.integers(0, 99))
def test_rounding_by_the_allocator_changes_little(program, size, seed):
    rng = np.random.default_rng(seed)
    traces = [run(program, *s, noise=lambda: int(rng.integers(0, 64))) for s in SIZES]
    hull, problem = fit_planes(traces)
    assert problem == ""
    exact = run(program, *size).peak_bytes
    assert peak_at(hull, *size) == pytest.approx(exact, rel=0.01, abs=20 * 64)


@given(programs(), graph_sizes, st.integers(0, 10**4), st.integers(0, 10**5))
def test_more_nodes_or_edges_never_need_less(program, size, more_nodes, more_edges):
    hull, _ = fit_planes([run(program, *s) for s in SIZES])
    least = peak_at(hull, *size)
    assert peak_at(hull, size[0] + more_nodes, size[1] + more_edges) >= least


def test_two_branches_are_fitted_each_by_itself():
    dense = ([(100, 50, 64)], [(0, True), (0, False)])
    sparse = ([(10, 90, 64), (5, 5, 64)], [(0, True), (1, True), (0, False), (1, False)])
    sizes = [(n, r * n) for n in (50, 70, 90, 110) for r in (1, 2, 8, 9)]
    # Seen on graphs of its own kind only, yet each holds everywhere it applies.
    traces = [run(dense if e > 4 * n else sparse, n, e) for n, e in sizes]
    hull, problem = fit_planes(traces)
    assert problem == ""
    assert len(hull) == 2
    assert peak_at(hull, 10**4, 10**5) >= run(dense, 10**4, 10**5).peak_bytes


def test_a_branch_seen_too_rarely_is_reported():
    usual = ([(10, 10, 64)], [(0, True), (0, False)])
    rare = ([(10, 90, 9999)], [(0, True), (0, False)])
    traces = [run(usual, *s) for s in SIZES]
    odd = run(rare, 300, 3000)
    hull, problem = fit_planes([*traces, MemoryTrace((300, 3000), odd.sizes, ("other", "other"))])
    assert "order of allocations" in problem
    assert not covers(peak_at(hull, 300, 3000), odd.peak_bytes)


def test_a_square_is_noticed_and_bounded():
    def square(nodes, edges):
        need = 4 * nodes * nodes + 16 * edges
        return MemoryTrace((nodes, edges), (need, -need), ("scores", "scores"))

    sizes = [(10 * n, 10 * e) for n, e in SIZES]
    traces = [square(*s) for s in sizes]
    _, problem = fit_planes(traces)
    assert "not linear" in problem
    curve = fit_curve([(*t.counts, t.peak_bytes) for t in traces])
    for nodes, edges in ((10**4, 10**5), (10**5, 10)):
        ratio = curve.at(nodes, edges) / square(nodes, edges).peak_bytes
        assert 1.0 <= ratio <= 1.25


held_planes = st.lists(
    st.builds(Linear, st.tuples(st.integers(0, 10**4), st.integers(0, 10**4)), st.just(0.0)),
    min_size=1,
)


@given(held_planes, st.integers(1, 10**5), st.floats(0, 60))
def test_what_is_held_is_bounded_between_the_graphs_that_were_measured(planes, nodes, ratio):
    def held(n, e):
        return max(round(plane.at(n, e)) for plane in planes)

    sizes = [(10_000, int(10_000 * r)) for r in (0, 0.5, 1, 2, 4, 8, 16, 60)]
    found = fit_held([(*size, held(*size)) for size in sizes])
    for size in sizes:
        assert peak_at(found, *size) == pytest.approx(held(*size), rel=1e-6, abs=1)
    size = nodes, int(nodes * ratio)
    assert peak_at(found, *size) >= (1 - 1e-6) * held(*size) - 1


@given(
    st.lists(st.tuples(*[st.integers(1, 10**4)] * 3), min_size=1, max_size=6),
    st.tuples(*[st.integers(1, 10**5)] * 3),
)
def test_what_is_held_for_three_counts_is_bounded_for_all(moments, size):
    """The largest of several moments, at counts unlike those measured."""

    def held(*counts):
        return max(int(np.dot(moment, counts)) for moment in moments)

    sizes = [(1000, 1000, 1000), (900, 10, 1000), (5, 500, 50)]
    sizes += [tuple(500 * n if i == k else n for i, n in enumerate((99, 90, 80))) for k in range(3)]
    found = fit_held([(*one, held(*one)) for one in sizes])
    for one in sizes:
        assert peak_at(found, *one) <= (1 + 1e-4) * held(*one) + 10
    assert peak_at(found, *size) >= (1 - 1e-4) * held(*size) - 1


@given(st.integers(0, 10**4), st.integers(0, 10**9), st.integers(0, 10**9))
def test_more_edges_of_as_many_nodes_have_no_fewer_paths(nodes, edges, more):
    *_, two, four = terms((nodes, edges))
    *_, two_of_more, four_of_more = terms((nodes, edges + more))
    assert two <= two_of_more <= 2 * nodes**2
    assert four <= four_of_more <= 2 * nodes**2


def test_a_dense_graph_has_as_many_paths_as_pairs_whether_alone_or_among_others():
    dense = terms((100, 10**7))
    assert dense[-2:] == [2 * 100**2, 2 * 100**2]
    among = terms((np.array([100.0, 10]), np.array([1e7, 0])))
    assert [float(each[0]) for each in among] == dense
    assert [float(each[1]) for each in among] == terms((10, 0))


def test_paths_of_sparse_graphs_do_not_count_as_squares():
    def paths(nodes, edges):
        return int(100 * nodes + 50 * min(nodes * nodes, edges * edges / nodes))

    sizes = [(n, int(n * r)) for n in (10, 60, 300, 2_000, 6_000) for r in (0.5, 3, 10, 30)]
    curve = fit_curve([(*size, paths(*size)) for size in sizes])
    for size in ((37, 250), (1_000, 4_000), (5_000, 2_500), (20_000, 100_000), (100, 9_000)):
        assert 1.0 <= curve.at(*size) / paths(*size) <= 1.3


def test_measurements_of_what_is_held_are_covered_even_where_they_contradict_each_other():
    uneven = [(10_000, 10_000, 9e6), (5_000, 20_000, 3e5), (400, 24_000, 9e6), (400, 24_000, 1)]
    found = fit_held(uneven)
    assert all(peak_at(found, n, e) >= 0.999 * held for n, e, held in uneven)
    assert all(min(plane.per) >= 0 for plane in found)
    assert fit_held([]) == fit_held([(10, 10, 5000)]) == ()


def test_a_model_that_allocates_nothing_has_no_planes():
    assert fit_planes([MemoryTrace((n, e), (), ()) for n, e in SIZES]) == ((), "")
    assert peak_at((), 10, 10) == 0


many = st.tuples(*[coefficients] * 5)


@given(st.lists(st.builds(Linear, many, st.integers(0, 10**6)), min_size=1, max_size=8), many)
def test_the_hull_of_several_counts_is_the_maximum_too(planes, counts):
    hull = upper_hull(planes)
    highest = max(plane.at(*counts) for plane in planes)
    assert peak_at(hull, *counts) == pytest.approx(highest, rel=1e-6, abs=1)


def test_memory_of_several_counts_is_found():
    rng = np.random.default_rng(0)

    def sizes_of(counts):
        a, b, c = counts
        first, second = 4 * a + 8 * b + 64, 16 * b + 32 * c
        return first, second, -first, -second

    graphs = [tuple(int(n) for n in rng.integers(10, 500, 3)) for _ in range(9)]
    traces = [MemoryTrace(counts, sizes_of(counts), ("l",) * 4) for counts in graphs]
    hull, problem = fit_planes(traces)
    assert problem == ""
    assert peak_at(hull, 10**4, 10**3, 10**5) == pytest.approx(
        4 * 10**4 + 24 * 10**3 + 32 * 10**5 + 64, rel=1e-6
    )


def test_what_is_held_for_several_counts_is_bounded():
    rng = np.random.default_rng(0)
    per = np.array([4, 100, 16])
    found = fit_held(
        [(*counts, int(per @ counts)) for counts in rng.integers(10, 10**5, (9, 3)).tolist()]
    )
    # Near the edge of what was measured, the bound is a little higher.
    assert 1 - 1e-6 <= peak_at(found, 10, 20, 30) / (per @ (10, 20, 30)) <= 1.05
    assert peak_at(fit_held([(10, 500), (100, 4000)]), 1000) == pytest.approx(50_000)
