import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.estimate.graph_sizes import GraphTerms, graph_sizes
from serve.estimate.solve import nonnegative
from serve.estimate.timing import Timed, fit_overhead, fit_time

SIZES = tuple((2**k, r * 2**k) for r in (2, 10, 30) for k in range(4, 15))


def samples(cost, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Timed((n, e), tuple(int(cost(n, e) * x) for x in np.exp(noise * rng.standard_normal(5))))
        for n, e in SIZES
    ]


def cached(nodes, edges):
    """200 µs, then cheap edges, then edges that miss the caches."""
    return 200_000 + 300 * nodes + 60 * edges + 200 * max(0, edges - 20_000)


def test_a_planted_cost_is_recovered():
    fit = fit_time(samples(lambda n, e: 250_000 + 400 * n + 120 * e))
    assert fit.at(3_000, 45_000) == pytest.approx(250_000 + 400 * 3_000 + 120 * 45_000, rel=1e-3)
    assert fit.constant_ns == pytest.approx(250_000, rel=0.02)
    assert fit.error_median < 1e-3


def test_a_bend_is_followed_where_it_was_not_measured():
    fit = fit_time(samples(cached, noise=0.03))
    rng = np.random.default_rng(1)
    errors = []
    for _ in range(200):
        nodes = int(10 ** rng.uniform(1.3, 4))
        edges = int(nodes * rng.uniform(2, 30))
        errors.append(abs(fit.at(nodes, edges) / cached(nodes, edges) - 1))
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.95) < 0.2


def all_pairs(nodes, edges):
    return 200_000 + 300 * nodes + 60 * edges + 4 * nodes * nodes


def test_work_that_grows_with_the_square_is_followed_beyond_what_was_measured():
    measured = [s for s in samples(all_pairs, noise=0.02) if s.counts[0] <= 1024]
    ramps, products = fit_time(measured), fit_time(measured, products=True)
    truth = all_pairs(4_000, 20_000)
    assert products.at(4_000, 20_000) == pytest.approx(truth, rel=0.15)
    assert ramps.at(4_000, 20_000) < 0.8 * truth
    assert products.error_p95 <= ramps.error_p95


def test_products_are_left_out_where_ramps_suffice():
    fit = fit_time(samples(cached), products=True)
    assert fit.at(4_000, 40_000) == pytest.approx(cached(4_000, 40_000), rel=0.1)


def test_disturbed_measurements_do_not_move_the_fit():
    clean = samples(cached, noise=0.02)
    disturbed = [
        Timed(s.counts, tuple(3 * ns for ns in s.runs_ns)) if i % 8 == 3 else s
        for i, s in enumerate(clean)
    ]
    fit = fit_time(disturbed)
    errors = [abs(fit.at(n, e) / cached(n, e) - 1) for n, e in SIZES]
    assert np.median(errors) < 0.08


def test_the_band_holds_what_it_says():
    fit = fit_time(samples(cached, noise=0.2))
    above = [ns > s_high for s, s_high in _bands(fit) for ns in s.runs_ns]
    assert 0.02 < np.mean(above) < 0.09
    assert fit.high_ratio > 1.2


def _bands(fit):
    return [(s, fit.high_ratio * fit.at(*s.counts)) for s in samples(cached, noise=0.2)]


@given(
    st.integers(0, 99),
    st.integers(0, 10**6),
    st.integers(0, 10**7),
    st.integers(0, 10**5),
    st.integers(0, 10**6),
)
def test_more_nodes_or_edges_never_take_less_time(seed, nodes, edges, more_nodes, more_edges):
    fit = fits[seed % len(fits)]
    assert fit.at(nodes + more_nodes, edges + more_edges) >= fit.at(nodes, edges) > 0


#: Noise enough that an unconstrained fit would bend down.
fits = [fit_time(samples(cached, noise=0.5, seed=seed)) for seed in range(8)]


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="at least 4 samples, got 2"):
        fit_time(samples(cached)[:2])


@given(st.integers(0, 10_000))
def test_nonnegative_least_squares_meets_its_optimality_conditions(seed):
    rng = np.random.default_rng(seed)
    columns, target = rng.standard_normal((12, 5)), rng.standard_normal(12)
    x = nonnegative(columns, target)
    gradient = columns.T @ (target - columns @ x)
    assert (x >= 0).all()
    # Karush, Kuhn and Tucker: no coefficient can improve by moving where it may.
    assert gradient[x > 0] == pytest.approx(0, abs=1e-7)
    assert (gradient[x == 0] <= 1e-7).all()


def test_nonnegative_least_squares_takes_equal_and_empty_columns():
    columns = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0], [3.0, 3.0, 0.0]])
    target = np.array([2.0, 4.0, 6.0])
    assert columns @ nonnegative(columns, target) == pytest.approx(target)


def test_overhead_is_split_into_a_base_and_a_rate():
    base_ns, ns_per_kib = fit_overhead([(10 << 10, 510_000.0), (1000 << 10, 1_500_000.0)])
    assert base_ns == pytest.approx(500_000)
    assert ns_per_kib == pytest.approx(1_000)


@pytest.mark.parametrize("kinds", [1, 3, 6])
def test_any_number_of_counts_is_followed(kinds):
    rng = np.random.default_rng(0)
    per = 50.0 * (1 + np.arange(kinds))
    sizes = [tuple(int(n) for n in 10 ** rng.uniform(1, 4, kinds)) for _ in range(40)]
    fit = fit_time([Timed(size, (int(200_000 + per @ size),) * 3) for size in sizes])
    size = (2_000,) * kinds
    assert fit.at(*size) == pytest.approx(200_000 + per @ size, rel=0.02)
    assert len(fit.largest) == kinds


def test_pairs_are_told_from_products():
    """Work on all pairs of things of a graph, and cheaper work on all pairs of things."""
    rng = np.random.default_rng(0)

    def cost(n, pairs):
        return 200_000 + 3 * n * n + 9 * pairs

    sizes = [2**k for k in range(4, 12)]
    seen = [(n, pairs) for n in sizes for pairs in (n, int(n**1.5), n * n)]
    measured = [
        Timed((n, p), tuple(int(cost(n, p) * x) for x in np.exp(0.02 * rng.standard_normal(5))))
        for n, p in seen
    ]
    fit = fit_time(measured, products=True, num_graph_terms=1)
    for n, pairs in ((300, 700), (1_500, 1_500**2 // 3), (900, 900 * 40)):
        assert fit.at(n, pairs) == pytest.approx(cost(n, pairs), rel=0.05)
    without = fit_time([Timed(s.counts[:1], s.runs_ns) for s in measured], products=True)
    assert without.error_p95 > 2 * fit.error_p95
    assert len(fit.ramps) == 1
    assert without.per_graph_term == ()


def test_padding_is_told_from_pairs():
    """Attention over all things of each graph, padded to the largest."""
    terms = GraphTerms((0,), padded=True)

    def cost(counts):
        *_, dense, scores = terms.terms(counts, 1)
        return 300_000 + 50 * dense + 2 * scores

    def counts_of(sizes):
        batch = np.repeat(np.arange(len(sizes)), sizes)
        counts = (sum(sizes),)
        return counts + terms.told(graph_sizes([("batch", 0)], {"batch": batch}, counts))

    each = [[n] for n in (16, 32, 64, 128, 256)] + [[1] * n for n in (16, 64, 256, 1_024)]
    each += [[n // 2] + [1] * (n // 2) for n in (16, 32, 64, 128, 256)]
    each += [[n] * n for n in (4, 8, 16, 32)] + [[n] + [1] * n * n for n in (4, 8, 16, 32)]
    seen = [counts_of(sizes) for sizes in each]
    measured = [Timed(terms.terms(counts, 1), (int(cost(counts)),)) for counts in seen]
    fit = fit_time(measured, num_graph_terms=4)
    for sizes in ([100] * 3 + [20] * 50, [300] + [2] * 400, [40] * 60):
        counts = counts_of(sizes)
        assert fit.at(*terms.terms(counts, 1)) == pytest.approx(cost(counts), rel=0.1)
