import pytest

from serve.estimate.sampling import SampleProbe, SampleSizes


def probe(num_ids, nodes, edges=None, prepare_ns=1000):
    return SampleProbe(num_ids, (nodes, nodes * 2 if edges is None else edges), prepare_ns)


def sizes(num_nodes=10_000, num_edges=50_000):
    probes = [probe(1, 10), probe(1, 12), probe(1, 14), probe(8, 90), probe(64, 600)]
    return SampleSizes(probes, (num_nodes, num_edges))


def test_medians_of_what_was_probed_and_lines_between():
    known = sizes()
    assert known.expected(1).num_nodes == 12
    assert known.expected(8).num_nodes == 90
    assert known.expected(36).num_nodes == pytest.approx((90 + 600) / 2, abs=1)
    assert known.expected(128).num_nodes == 1200
    assert known.expected(0).num_nodes == 0


def test_no_sample_is_larger_than_the_graph_or_smaller_than_what_was_asked():
    known = sizes(500, 700)
    size = known.expected(1000)
    assert (size.num_nodes, size.num_edges) == (500, 700)
    assert (size.num_nodes_high, size.num_edges_high) == (500, 700)
    assert SampleSizes([probe(1, 1, 0)], (100, 0)).expected(50).num_nodes == 50


def test_a_changed_graph_has_other_limits():
    known = sizes(500, 700)
    known.resized(5000, 7000)
    assert known.expected(1000).num_nodes == 5000


def test_memory_is_for_more_than_the_median():
    size = sizes().expected(8)
    assert size.num_nodes_high >= 1.25 * size.num_nodes
    assert size.num_edges_high >= 1.25 * size.num_edges


def test_it_follows_clients_that_ask_for_hubs():
    known = sizes()
    for _ in range(12):
        known.observe(probe(8, 360, prepare_ns=5000))
    size = known.expected(8)
    assert size.num_nodes == pytest.approx(360, rel=0.05)
    assert size.prepare_ns == pytest.approx(5000, rel=0.05)
    # And so for other numbers of ids.
    assert known.expected(64).num_nodes == pytest.approx(2400, rel=0.05)


def test_the_upper_quantile_is_passed_by_one_in_twenty():
    known = sizes()
    spread = [80, 85, 90, 95, 100] * 3 + [90, 90, 90, 90, 300]
    passed = 0
    for index in range(2000):
        size = known.expected(8)
        nodes = spread[index * 7 % len(spread)]
        passed += nodes > size.num_nodes_high
        known.observe(probe(8, nodes))
    assert passed <= 2000 * 0.08


def test_it_needs_something_to_go_by():
    with pytest.raises(ValueError, match="probe"):
        SampleSizes([], (1, 1))


def test_several_counts_are_learned_one_by_one():
    """Kinds of nodes and edges; the ids are of the second kind."""
    probes = [SampleProbe(1, (3, 5, 7), 1000), SampleProbe(64, (300, 500, 700), 1000)]
    known = SampleSizes(probes, (1_000, 2_000, 10_000), kinds_of_nodes=2, asked=1)
    assert known.expected(64).counts == (300, 500, 700)
    for _ in range(12):
        known.observe(SampleProbe(64, (300, 1_000, 700), 1000))
    size = known.expected(64)
    assert size.counts == (300, pytest.approx(1_000, rel=0.05), 700)
    assert (size.num_nodes, size.num_edges) == (sum(size.counts[:2]), 700)
    assert all(high >= usual for high, usual in zip(size.counts_high, size.counts, strict=True))
    assert known.expected(5_000).counts == (1_000, 2_000, 10_000), "no more than the graph has"
    known.resized(10, 4_000, 10)
    assert known.expected(3_000).counts[0] == 10
    assert known.expected(3_000).counts[1] >= 3_000, "the ids are nodes of the sample"
