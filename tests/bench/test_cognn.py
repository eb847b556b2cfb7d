"""CoGNN's queues: what is taken from the paper adds up, and the systems come out in its order."""

import argparse
from statistics import fmean

import pytest

from bench.papers import cognn_costs
from bench.papers.cognn import MEMORY_BYTES, WORKERS, groups, simulated, times
from bench.papers.cognn_queues import LOG_GROUP_MIB, QUEUES, TABLE_V


@pytest.mark.parametrize("name", QUEUES)
def test_default_is_the_sum_of_all_tasks_and_about_the_papers(name):
    found = times(simulated("default", name, "full"))
    whole_s = sum(one.start_s + one.work_s for one in QUEUES[name])
    assert found["makespan"] == pytest.approx(whole_s / 60)
    place = list(QUEUES).index(name)
    for figure, told in zip(("makespan", "jct", "qt"), TABLE_V["default"], strict=True):
        assert found[figure] == pytest.approx(told[place], rel=0.08)


def test_figures_of_a_full_device_by_hand():
    """One task at a time: each waits for those ahead of it."""
    ends, now_s = [], 0.0
    for one in sorted(QUEUES["GCN"], key=lambda one: one.reserve_bytes):
        now_s += one.work_s
        ends.append(now_s)
    found = times(simulated("pipeswitch", "GCN", "full"))
    assert found["makespan"] == pytest.approx(now_s / 60, rel=1e-6)
    # In groups of two both end within the time that the two would take one after the other.
    lmcf = times(simulated("lmcf", "GCN", "full"))
    assert lmcf["makespan"] == pytest.approx(now_s / 60, rel=1e-6)
    assert fmean(ends) / 60 <= lmcf["jct"] <= fmean(ends[1:] + ends[-1:]) / 60


@pytest.mark.parametrize("device", ["occupancy", "full", "fitted"])
def test_tasks_end_soonest_by_lmcf(device):
    for name in QUEUES:
        jct = {one: times(simulated(one, name, device))["jct"] for one in TABLE_V}
        assert min(jct, key=jct.__getitem__) == "lmcf"
        assert jct["default"] > 4 * jct["lmcf"]
        assert max(jct[one] for one in ("base", "bmc", "pipeswitch")) < jct["default"]


@pytest.mark.parametrize("policy", LOG_GROUP_MIB)
@pytest.mark.parametrize("name", QUEUES)
def test_groups_are_the_papers_and_fit(policy, name):
    found = groups(policy, name)
    assert found["count"] == found["paper_count"]
    assert found["most_gib"] == pytest.approx(found["paper_most_gib"], rel=0.08)
    assert found["most_reserved_gib"] <= MEMORY_BYTES / (1 << 30)
    assert len(QUEUES[name]) <= WORKERS * found["count"]


def test_what_decisions_cost_is_told_in_epochs_of_the_queue(monkeypatch):
    """Whatever the clock says: here each act takes as long as an epoch of the GCN queue."""
    epoch_ns = 1e9 * cognn_costs.epoch_s(QUEUES["GCN"])
    monkeypatch.setattr(cognn_costs, "deciding", lambda system, tasks: 2 * epoch_ns)
    monkeypatch.setattr(cognn_costs, "timed", lambda act: epoch_ns)
    options = argparse.Namespace(queues=("GCN",), tasks=20, runs=1)
    found = list(cognn_costs.rows(options, meter=None))
    assert [row["policy"] for row in found] == ["base", "lmcf", "bmc"]
    # All tasks of this queue differ in data or layers.
    assert all(row["estimate"] == pytest.approx(20) for row in found)
    assert all(row["schedule"] == pytest.approx(2) for row in found)
    assert found[1]["paper_schedule"] == 5.18
