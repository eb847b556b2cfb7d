import math

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.core.types import ALIGNMENT_BYTES
from serve.estimate import Calibration, ModelEstimator, Overhead
from serve.estimate.calibration import Curve, Loopless
from serve.estimate.slowdown import Slowdowns

NODES, EDGES = 1_000, 10_000
#: Input 288,000 bytes and the first plane 3,100,064; kernels take 32 bytes an edge besides.
PEAK_BYTES = 288_000 + 3_100_064
NEED_BYTES = 288_000 + 3_420_000
RUN_NS = 3_000_000


@pytest.fixture
def estimator(calibration):
    return ModelEstimator(calibration, Overhead(400_000, 100))


@pytest.fixture
def worn(estimator):
    """An estimator that has seen all kinds of runs."""
    rng = np.random.default_rng(5)
    for nodes, ratio, spread in rng.uniform(0, 1, (300, 3)):
        size = int(10 ** (6 * nodes)), int(30 * ratio * 10 ** (6 * nodes))
        estimator.observe_run(size, int(estimator.estimate(*size).run_ns * 4**spread / 2))
    return estimator


def test_an_estimate_is_the_sum_of_its_parts(estimator):
    found = estimator.estimate(NODES, EDGES)
    assert found.peak_bytes == PEAK_BYTES
    assert found.run_ns == RUN_NS
    assert found.solo_ns == RUN_NS + 400_000 + math.ceil(100 * 288_000 / 1024)
    # 3 % above all that is held, and the answer's 28 bytes a node.
    least = 1.03 * NEED_BYTES + 28 * NODES
    assert least <= found.reserve_bytes < least + ALIGNMENT_BYTES
    assert found.reserve_bytes % ALIGNMENT_BYTES == 0
    assert estimator.output_bytes(NODES, EDGES) == 28 * NODES


def test_the_breakdown_agrees_with_the_estimate(estimator):
    found, parts = estimator.estimate(NODES, EDGES), estimator.describe(NODES, EDGES)
    assert (parts.peak_bytes, parts.reserve_bytes) == (found.peak_bytes, found.reserve_bytes)
    assert (parts.run_ns, parts.solo_ns) == (found.run_ns, found.solo_ns)
    assert parts.input_bytes + parts.activation_bytes == parts.peak_bytes
    assert parts.workspace_bytes == NEED_BYTES - PEAK_BYTES
    assert parts.run_high_ns == pytest.approx(1.2 * RUN_NS)
    assert parts.solo_high_ns - parts.solo_ns == parts.run_high_ns - parts.run_ns
    assert parts.peak_where == "convs.1 (SAGEConv): aten::div"
    assert estimator.describe(NODES, 0).peak_where == "convs.2 (SAGEConv): aten::add"
    assert parts.warning == ""


def test_a_union_takes_what_its_graphs_take_as_one_and_joining_them(estimator):
    sizes = [(NODES, EDGES), (10, 40), (500, 0)]
    union, whole = estimator.union(sizes), estimator.estimate(NODES + 510, EDGES + 40)
    assert 0 < union.run_ns - whole.run_ns < 0.2 * whole.run_ns
    staged = sum(estimator.input_bytes(*size) for size in sizes)
    for name in ("peak_bytes", "reserve_bytes"):
        added = getattr(union, name) - getattr(whole, name)
        assert staged <= added < staged + 4096
    assert union.reserve_bytes % ALIGNMENT_BYTES == 0


def test_a_union_under_a_curve_takes_what_its_graphs_take_alone_at_least(calibration):
    # Paths of two edges: E²/N. A small dense graph has more than the same edges on all nodes.
    per = (0.0,) * 5 + (50.0, 0.0)
    fit = msgspec.structs.replace(
        calibration.memory, activations=(), held=(), curve=Curve(4_096.0, per)
    )
    estimator = ModelEstimator(
        msgspec.structs.replace(calibration, memory=fit), Overhead(), safety=1.0
    )
    sizes = [(100, 5_000), (20_000, 10)]
    alone = [estimator.estimate(*size) for size in sizes]
    whole = estimator.estimate(20_100, 5_010)
    assert whole.peak_bytes - estimator.input_bytes(20_100, 5_010) < alone[0].peak_bytes / 2
    union, staged = estimator.union(sizes), estimator.input_bytes(20_100, 5_010)
    for name in ("peak_bytes", "reserve_bytes"):
        # What was staged is held beside the joined copy.
        assert getattr(union, name) - staged >= sum(getattr(one, name) for one in alone)
    # Where the joined graph needs more, that counts: products of counts grow faster than sums.
    fit = msgspec.structs.replace(fit, curve=Curve(4_096.0, (0.0, 0.0, 8.0, 0.0, 0.0, 0.0, 0.0)))
    estimator = ModelEstimator(msgspec.structs.replace(calibration, memory=fit), Overhead())
    union, whole = estimator.union([(300, 10), (300, 10)]), estimator.estimate(600, 20)
    alone = estimator.estimate(300, 10)
    assert whole.peak_bytes > 2 * alone.peak_bytes
    assert union.peak_bytes >= whole.peak_bytes
    assert union.reserve_bytes >= whole.reserve_bytes


def test_runs_of_unions_are_learned_from_without_the_joining(estimator):
    sizes = [(100, 1_000)] * 8
    before = estimator.estimate(800, 8_000).run_ns
    for _ in range(20):
        estimator.observe_union(sizes, estimator.union(sizes).run_ns)
    assert estimator.estimate(800, 8_000).run_ns == pytest.approx(before, rel=0.02)
    for _ in range(40):
        estimator.observe_union(sizes, 2 * before)
    assert estimator.union(sizes).run_ns == pytest.approx(2 * before, rel=0.1)


def test_an_empty_graph_still_takes_time(estimator):
    found = estimator.estimate(0, 0)
    assert found.peak_bytes == 64
    assert found.run_ns == 1_000_000


@given(st.integers(0, 10**6), st.integers(0, 10**7), st.integers(0, 10**5), st.integers(0, 10**6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_estimates_never_decrease_with_size(worn, nodes, edges, more_nodes, more_edges):
    small = worn.estimate(nodes, edges)
    large = worn.estimate(nodes + more_nodes, edges + more_edges)
    assert large.peak_bytes >= small.peak_bytes
    assert large.reserve_bytes >= small.reserve_bytes
    assert large.run_ns >= small.run_ns
    assert large.solo_ns >= small.solo_ns


def test_a_run_within_its_reserve_changes_nothing(estimator):
    before = estimator.estimate(NODES, EDGES)
    estimator.observe_run((NODES, EDGES), RUN_NS, int(1.02 * PEAK_BYTES))
    assert estimator.estimate(NODES, EDGES) == before
    assert estimator.underestimates == 0


def test_an_overrun_raises_every_later_estimate_of_the_model(estimator):
    smaller = estimator.estimate(NODES // 2, EDGES // 2)
    measured = int(1.5 * PEAK_BYTES)
    estimator.observe_run((NODES, EDGES), RUN_NS, measured)
    assert estimator.underestimates == 1
    after = estimator.estimate(NODES, EDGES)
    assert measured <= after.peak_bytes <= measured + 2
    assert after.reserve_bytes > 1.03 * measured
    assert estimator.estimate(NODES // 2, EDGES // 2).peak_bytes > 1.49 * smaller.peak_bytes
    estimator.observe_run((NODES, EDGES), RUN_NS, PEAK_BYTES // 2)
    assert estimator.estimate(NODES, EDGES) == after


@pytest.fixture
def dropping(calibration):
    """An estimator of a model that drops its loops; one takes 40 bytes, 8 of kernels among them."""
    memory = calibration.memory
    loopless = Loopless(
        activations=memory.activations, held=memory.held, loop_activations=32, loop_held=40
    )
    memory = msgspec.structs.replace(memory, loopless=loopless)
    return ModelEstimator(msgspec.structs.replace(calibration, memory=memory), Overhead())


def test_loops_that_were_counted_take_what_they_take_and_unknown_ones_what_edges_take(dropping):
    others = dropping.estimate(NODES, EDGES - 2_000)
    found = dropping.estimate(NODES, EDGES, num_loops=2_000)
    # 16 bytes of inputs, as every edge.
    assert found.peak_bytes == others.peak_bytes + 2_000 * (32 + 16)
    margin = 1.03 * 2_000 * (40 + 16)
    assert found.reserve_bytes == pytest.approx(others.reserve_bytes + margin, abs=2 * 512)
    assert dropping.estimate(NODES, EDGES, num_loops=0) == dropping.estimate(NODES, EDGES)
    unknown = dropping.estimate(NODES, EDGES)
    assert dropping.estimate(NODES, EDGES, num_loops=EDGES).peak_bytes < unknown.peak_bytes
    assert found.run_ns == unknown.run_ns


def test_loops_change_nothing_where_they_take_what_other_edges_take(estimator):
    assert not estimator.counts_loops
    assert estimator.estimate(NODES, EDGES, num_loops=2_000) == estimator.estimate(NODES, EDGES)


def test_an_overrun_is_one_of_what_was_reserved_for_the_loops_counted(dropping):
    counted = dropping.estimate(NODES, EDGES, num_loops=2_000)
    measured = int(1.1 * counted.peak_bytes)
    assert measured < dropping.estimate(NODES, EDGES).peak_bytes
    dropping.observe_run((NODES, EDGES), RUN_NS, measured)
    assert dropping.underestimates == 0
    dropping.observe_run((NODES, EDGES), RUN_NS, measured, num_loops=2_000)
    assert dropping.underestimates == 1
    assert dropping.estimate(NODES, EDGES, num_loops=2_000).peak_bytes >= measured


def test_a_small_graph_that_needed_far_more_does_not_rule_out_large_ones(estimator):
    large = estimator.estimate(NODES, EDGES)
    small = estimator.estimate(3, 4)
    measured = 1000 * small.peak_bytes
    estimator.observe_run((3, 4), RUN_NS, measured)
    assert estimator.estimate(3, 4).peak_bytes == measured
    assert estimator.estimate(NODES, EDGES).peak_bytes == large.peak_bytes + 999 * small.peak_bytes
    estimator.observe_run((3, 4), RUN_NS, measured)
    assert estimator.underestimates == 1


def test_kernels_that_take_more_than_their_workspace_raise_the_estimate_too(estimator):
    before = estimator.estimate(NODES, EDGES)
    usable = math.ceil(1.03 * NEED_BYTES)
    estimator.observe_run((NODES, EDGES), RUN_NS, PEAK_BYTES, usable)
    assert estimator.estimate(NODES, EDGES) == before
    estimator.observe_run((NODES, EDGES), RUN_NS, PEAK_BYTES, usable + 1_000_000)
    assert estimator.underestimates == 1
    after = estimator.estimate(NODES, EDGES)
    assert after.reserve_bytes - estimator.output_bytes(NODES, EDGES) >= usable + 1_000_000


def test_rounding_in_a_tiny_graph_is_no_overrun(estimator):
    peak = estimator.estimate(3, 4).peak_bytes
    estimator.observe_run((3, 4), 1_000_000, peak + 1024)
    assert estimator.memory_scale == 1.0


def test_a_run_twice_as_slow_from_now_on_is_believed_within_20(estimator):
    rng = np.random.default_rng(0)
    sizes = [(int(n), int(n * r)) for n, r in zip(*rng.uniform(2, 30, (2, 200)), strict=True)]
    true = {s: estimator.estimate(*s).run_ns for s in sizes}
    for size in sizes[:100]:
        estimator.observe_run(size, int(true[size] * math.exp(0.1 * rng.standard_normal())))
    assert estimator.estimate(NODES, EDGES).run_ns == pytest.approx(RUN_NS, rel=0.15)
    for size in sizes[100:120]:
        estimator.observe_run(size, int(2 * true[size] * math.exp(0.1 * rng.standard_normal())))
    assert estimator.time_factor == pytest.approx(2, rel=0.2)
    errors = [estimator.estimate(*size).run_ns / (2 * true[size]) - 1 for size in sizes]
    assert np.median(np.abs(errors)) < 0.15


def test_one_absurd_run_is_ignored(estimator):
    for _ in range(30):
        estimator.observe_run((NODES, EDGES), RUN_NS)
    estimator.observe_run((NODES, EDGES), 100 * RUN_NS)
    assert estimator.estimate(NODES, EDGES).run_ns == pytest.approx(RUN_NS, rel=0.05)


def test_runs_beside_others_do_not_spoil_the_solo_estimate(estimator):
    for _ in range(150):
        estimator.observe_run((NODES, EDGES), RUN_NS)
        estimator.observe_run((NODES, EDGES), int(1.4 * RUN_NS), beside=1.0)
    assert estimator.estimate(NODES, EDGES).run_ns == pytest.approx(RUN_NS, rel=0.05)
    assert estimator.run_ns(NODES, EDGES, beside=1.0) == pytest.approx(1.4 * RUN_NS, rel=0.08)


def test_runs_beside_training_jobs_tell_what_jobs_do_and_spoil_nothing_else(calibration):
    slowdown = Slowdowns()
    estimator = ModelEstimator(calibration, Overhead(), slowdown)
    for _ in range(150):
        estimator.observe_run((NODES, EDGES), RUN_NS)
        estimator.observe_run((NODES, EDGES), int(1.4 * RUN_NS), beside=1.0)
        estimator.observe_run((NODES, EDGES), int(1.2 * RUN_NS), jobs=1.0)
        estimator.observe_run((NODES, EDGES), int(1.4 * 1.2 * RUN_NS), beside=1.0, jobs=1.0)
    assert estimator.estimate(NODES, EDGES).run_ns == pytest.approx(RUN_NS, rel=0.05)
    assert slowdown.by_runs.table == (1.0, pytest.approx(1.4, rel=0.08))
    assert slowdown.by_jobs.table == (1.0, pytest.approx(1.2, rel=0.08))


def test_a_run_suspended_before_it_began_teaches_memory_alone(estimator):
    before = estimator.estimate(NODES, EDGES)
    for _ in range(20):
        estimator.observe_run((NODES, EDGES), -RUN_NS, 2 * before.reserve_bytes, beside=1.0)
    after = estimator.estimate(NODES, EDGES)
    assert after.run_ns == before.run_ns
    assert after.peak_bytes > before.peak_bytes


def test_where_jobs_always_train_the_estimates_of_runs_alone_stay(calibration):
    """Times scatter upwards, which is neither the machine's doing nor that of jobs."""
    slowdown = Slowdowns()
    estimator = ModelEstimator(calibration, Overhead(), slowdown)
    rng = np.random.default_rng(0)
    for longer in rng.exponential(0.4, 1000):
        estimator.observe_run((NODES, EDGES), int(RUN_NS * (0.9 + longer)), jobs=1.0)
    assert estimator.estimate(NODES, EDGES).run_ns == pytest.approx(RUN_NS, rel=0.05)
    assert slowdown.by_jobs.table[1] < 1.5


def test_the_band_widens_with_what_is_seen(estimator):
    rng = np.random.default_rng(0)
    before = estimator.describe(NODES, EDGES).solo_high_ns
    for _ in range(400):
        estimator.observe_run((NODES, EDGES), int(RUN_NS * math.exp(0.5 * rng.standard_normal())))
    assert estimator.describe(NODES, EDGES).solo_high_ns > 1.3 * before


def test_overhead_is_calibrated_and_corrected(calibration):
    overhead = Overhead()
    estimator = ModelEstimator(calibration, overhead)
    assert estimator.estimate(NODES, EDGES).solo_ns == RUN_NS
    overhead.calibrate([(1024, 501_000)] * 4 + [(1024, 90_000_000)] + [(10_240, 510_000)] * 5)
    assert overhead.base_ns == pytest.approx(500_000)
    assert overhead.ns_per_kib == pytest.approx(1_000)
    added = estimator.estimate(NODES, EDGES).solo_ns - RUN_NS
    for _ in range(20):
        estimator.observe_solo((NODES, EDGES), RUN_NS + 2 * added)
    assert estimator.estimate(NODES, EDGES).solo_ns == pytest.approx(RUN_NS + 2 * added, rel=0.01)


def test_a_solo_time_is_not_what_runs_take_on_cores_that_load_keeps_warm(estimator):
    alone_ns = 2 * estimator.estimate(NODES, EDGES).solo_ns
    for _ in range(40):
        estimator.observe_solo((NODES, EDGES), alone_ns)
    for _ in range(200):
        estimator.observe_run((NODES, EDGES), RUN_NS // 2)
    found = estimator.estimate(NODES, EDGES)
    assert found.run_ns == pytest.approx(RUN_NS / 2, rel=0.02)
    assert found.solo_ns == pytest.approx(alone_ns, rel=0.02)


def test_a_solo_time_is_never_below_the_run(estimator):
    for _ in range(200):
        estimator.observe_run((NODES, EDGES), 5 * RUN_NS)
    found = estimator.estimate(NODES, EDGES)
    assert found.solo_ns >= found.run_ns > 4 * RUN_NS


def test_overhead_without_samples_stays_as_it_was():
    overhead = Overhead(5, 6)
    overhead.calibrate([])
    assert (overhead.base_ns, overhead.ns_per_kib) == (5, 6)


def test_a_curve_counts_where_it_is_higher(calibration):
    memory = msgspec.structs.replace(
        calibration.memory,
        curve=Curve(0, (0, 0, 4, 0, 0, 0, 0)),
        warning="memory is a fitted bound",
    )
    curved = ModelEstimator(msgspec.structs.replace(calibration, memory=memory), Overhead())
    assert curved.estimate(100_000, 10).peak_bytes == 4 * 10**10 + 128 * 10**5 + 160
    flat = ModelEstimator(calibration, Overhead())
    assert curved.estimate(100, 10**6).peak_bytes == flat.estimate(100, 10**6).peak_bytes
    assert curved.describe(1, 1).warning == "memory is a fitted bound"


def test_nonsense_is_refused(calibration):
    with pytest.raises(ValueError, match=r"at least 1, got 0\.9"):
        ModelEstimator(calibration, Overhead(), safety=0.9)
    with pytest.raises(ValueError, match="negative"):
        Overhead(-1, 0)


def test_a_calibration_survives_json_and_msgpack(calibration):
    assert msgspec.json.decode(msgspec.json.encode(calibration), type=Calibration) == calibration
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(calibration), type=Calibration) == calibration
    )


def test_who_serves_a_model_is_told_why_its_own_code_runs(calibration):
    told = {"executor_reason": "csr cannot run it", "executor": "eager"}
    fallen_back = msgspec.structs.replace(calibration, **told)
    assert fallen_back.remarks == "runs as PyG wrote it: csr cannot run it"
    fused = msgspec.structs.replace(calibration, executor="csr", executor_reason="faster")
    assert fused.remarks == fused.warning == ""


def test_a_run_that_should_have_taken_nothing_is_learned_from(calibration):
    nothing = msgspec.structs.replace(calibration.time, constant_ns=0.0)
    free = msgspec.structs.replace(calibration.memory, activations=(), held=())
    estimator = ModelEstimator(
        msgspec.structs.replace(calibration, time=nothing, memory=free), Overhead()
    )
    estimator.observe_run((0, 0), 50_000, peak_bytes=1 << 20)
    estimator.observe_solo((0, 0), 60_000)
    assert estimator.estimate(0, 0).peak_bytes >= 1 << 20
    assert estimator.estimate(NODES, EDGES).run_ns > 1
