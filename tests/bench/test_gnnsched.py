"""The figures of the GNNSched paper on made-up machines."""

import argparse
import json
from statistics import fmean

import pytest

from bench.papers import gnnsched
from bench.papers.gnnsched import FIGURES, OURS, SYSTEMS
from bench.papers.queues import LOADS, QUEUES, Queues
from serve.core.types import Bytes, Nanos, TaskEstimate
from serve.sim.paper import shared_by
from serve.workload import GraphRef

MS = 1_000_000
OPTIONS = argparse.Namespace(runs=1, shares=(0.5,), slots=(2.0,), pagings=(1.0, 10.0))


def estimate(model, num_nodes, num_edges):
    """A millisecond a thousand nodes, and as many bytes as edges."""
    run_ns = Nanos(num_nodes * 1000)
    reserve = Bytes(num_edges)
    return TaskEstimate(peak_bytes=reserve, reserve_bytes=reserve, run_ns=run_ns, solo_ns=run_ns)


@pytest.fixture
def queues():
    refs = [
        GraphRef(dataset, index, 1000 * (1 + index), 100 * (1 + index))
        for dataset in ("pubmed", "reddit")
        for index in range(10)
    ]
    return Queues(refs, estimate)


@pytest.fixture
def found(queues):
    devices = gnnsched.devices(queues, cores=2, table=None)
    return gnnsched.figures(queues, devices, OPTIONS)


def test_every_device_load_queue_and_system_has_its_figures(found):
    cases = {(row["device"], row["load"], row["queue"], row["system"]) for row in found["rows"]}
    assert len(cases) == len(found["rows"]) == 3 * len(LOADS) * len(QUEUES) * len(SYSTEMS)
    assert len(SYSTEMS) == 6
    assert all(row[name] >= 0 for row in found["rows"] for name in FIGURES)


def test_the_headlines_are_means_over_loads_queues_and_policies(found):
    told = {(row["device"], row["figure"], row["against"]): row for row in found["headlines"]}
    rows = {
        (row["load"], row["queue"], row["system"]): row["jct_over_qt_mean"]
        for row in found["rows"]
        if row["device"] == "cores"
    }
    by_hand = fmean(
        1 - rows[load, queue, policy] / rows[load, queue, "default"]
        for load in LOADS
        for queue in QUEUES
        for policy in ("sqtf", "bqt")
    )
    assert told["cores", "jct_over_qt_mean", "default"]["gnnsched"] == pytest.approx(by_hand)


def test_lower_than_by_hand():
    values = {("low", "a"): 1.0, ("high", "a"): 3.0, ("low", "b"): 2.0, ("high", "b"): 4.0}
    rows = [
        {"load": load, "system": system, "queue": queue, "jct": jct}
        for (load, system), jct in values.items()
        for queue in QUEUES
    ]
    assert gnnsched.lower(rows, ("a",), "b", "jct") == pytest.approx((0.5 + 0.25) / 2)


def test_the_worst_is_of_the_high_load(queues):
    device = gnnsched.gpu("made up", queues, shared_by(2), 2.0)
    rows = [
        {"load": load, "system": system, "violation_rate": rate}
        for load, rate in (("low", 0.9), ("high", 0.1), ("high", 0.2))
        for system in SYSTEMS
    ]
    assert gnnsched.worst(device, rows) == {
        "device": "made up", "rho": pytest.approx(0.5), **dict.fromkeys(SYSTEMS, 0.2),
    }  # fmt: skip


def test_memory_is_that_of_the_four_largest_and_graphs_alike_are_the_largest(queues):
    # A graph is a task of three models, and there are two data sets.
    assert queues.four_tasks_bytes() == 4 * 1000
    alike = queues.alike()
    assert {ref.num_nodes for ref in alike.refs} == {6000, 7000, 8000, 9000, 10_000}
    assert len({(ref.dataset, ref.index) for ref in alike.refs}) == len(queues.refs)


def test_paging_costs_mps_aggr_its_targets(found):
    by_device = {(row["device"], row["paging"]): row["worst"] for row in found["paging"]}
    assert by_device["implied", 10.0] > by_device["implied", 1.0]


def test_a_measured_table_is_interpolated(tmp_path, queues):
    path = tmp_path / "concurrency.json"
    path.write_text(json.dumps({"slowdown": {"table": {"0": 1.0, "1": 1.2, "3": 2.0, "7": 4.0}}}))
    slowdown = gnnsched.measured_slowdown(path)
    assert slowdown == pytest.approx([1.0, 1.2, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0])
    device = gnnsched.devices(queues, cores=2, table=path)[-1]
    assert device.name == "gpu"
    assert device.capacity == pytest.approx(8 / 4)
    assert 0 <= fmean(r.violations for r in device.serve(OURS, "low", "mix", 1)) <= 100
