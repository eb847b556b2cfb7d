"""GNNSched's Figures 9 and 10 from made-up runs."""

import argparse
import re

import pytest

from bench.papers import gnnsched, gnnsched_costs
from bench.papers.gnnsched_costs import PARTS, SYSTEMS, Recorder, costs, error_of, errors
from bench.papers.queues import LOADS, QUEUES, Queues
from docs.drawings.gnnsched_costs import gnnsched_costs_picture
from serve.core.scheduler import Scheduler
from serve.core.types import Bytes, Nanos, TaskEstimate
from serve.sim.engine import Simulation
from serve.workload import GraphRef

OPTIONS = argparse.Namespace(runs=2, repeats=3)


class CountingMeter:
    """Counts what a lane's meter is asked."""

    def __init__(self):
        self.asked = []

    def insert(self, limit_bytes):
        self.asked.append("insert")

    def clear(self):
        self.asked.append("clear")


def estimate(model, num_nodes, num_edges):
    """A millisecond a thousand nodes, and as many bytes as edges."""
    run_ns, reserve = Nanos(num_nodes * 1000), Bytes(num_edges)
    return TaskEstimate(peak_bytes=reserve, reserve_bytes=reserve, run_ns=run_ns, solo_ns=run_ns)


@pytest.fixture
def device():
    refs = [
        GraphRef(dataset, index, 1000 * (1 + index), 100 * (1 + index))
        for dataset in ("pubmed", "reddit")
        for index in range(10)
    ]
    return gnnsched.devices(Queues(refs, estimate), 2, None)[0]


def test_every_load_queue_and_system_has_its_costs(device):
    meter = CountingMeter()
    rows = list(gnnsched_costs.cost_rows(device, OPTIONS, meter))
    cases = {(row["load"], row["queue"], row["system"]) for row in rows}
    assert len(cases) == len(rows) == len(LOADS) * len(QUEUES) * len(SYSTEMS)
    assert all(row["schedule_ns"] > 0 and row["estimate_ns"] > 0 for row in rows)
    # About as long as its graphs have thousands of nodes.
    assert all(1e6 < row["run_ns"] < 10e6 for row in rows)
    assert meter.asked == ["insert", "clear"] * OPTIONS.repeats


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_events_that_are_timed_give_the_decisions_that_were_simulated(device, system):
    made = device.system(system)
    recorder = Recorder(made.params)
    slot_s = device.slot * device.queues.mean_solo_s("gcn", 0)
    simulation = Simulation(recorder, made.device)
    simulation.run(device.queues.requests("gcn", LOADS["high"], slot_s, 0))
    again = Scheduler(made.params)
    first, second = (
        [command for event, now_ns in recorder.told for command in scheduler.handle(event, now_ns)]
        for scheduler in (Scheduler(made.params), again)
    )
    assert first == second
    answered = {row.task.task_id for row in simulation.answered}
    assert {c.task_id for c in second if type(c).__name__ == "AnswerTask"} == answered


def cost_row(load, queue, system, **changed):
    parts = {"estimate_ns": 1000, "schedule_ns": 2000, "insert_ns": 500}
    return {"load": load, "queue": queue, "system": system, "run_ns": 1e6, **parts, **changed}


def test_costs_are_means_of_shares():
    rows = [cost_row(load, queue, system)
            for load in LOADS for queue in ("gcn", "gin") for system in SYSTEMS]  # fmt: skip
    rows[0] = cost_row("low", "gcn", SYSTEMS[0], run_ns=2e6, schedule_ns=12_000)
    found = {(row["load"], row["system"]): row for row in costs(rows)}
    assert found["high", "bqt"]["permille"] == pytest.approx(3.5)
    assert found["high", "bqt"]["paper_permille"] == pytest.approx(3.0)
    mixed = found["low", SYSTEMS[0]]
    assert mixed["schedule_permille"] == pytest.approx((6 + 2) / 2)
    assert mixed["permille"] == pytest.approx(sum(mixed[f"{part}_permille"] for part in PARTS))
    assert mixed["us"] == pytest.approx((13.5 + 3.5) / 2)


def accuracy(model, error, table_2):
    return {"model": model, "dataset": "pubmed", "number": 0, "measured_bytes": 10,
            "error": error, "table_2_error": table_2}  # fmt: skip


def test_errors_are_the_extremes_of_a_model():
    found = [accuracy("gcn", 0.01, -0.2), accuracy("gcn", -0.02, 0.3), accuracy("gin", 0.5, 0.5)]
    row = errors("gcn", found)
    assert (row["low"], row["high"]) == (-0.02, 0.01)
    assert (row["table_2_low"], row["table_2_high"], row["table_2_below"]) == (-0.2, 0.3, 1)
    assert row["graphs"] == 2


def test_an_error_is_estimate_over_measurement():
    class Run:
        model, dataset, num_nodes, num_edges = "gcn", "pubmed", 3, 4
        measured_bytes, estimate_bytes, paper_bytes = 1000, 1010, 900

    row = error_of(7, Run())
    assert (row["error"], row["table_2_error"], row["number"]) == (0.01, -0.1, 7)


def test_the_picture_has_a_dot_for_each_estimate_and_a_bar_for_each_part():
    found = [accuracy(model, 0.01, 5.0) for model in ("gcn", "sage") for _ in range(3)]
    rows = [cost_row(load, "gcn", system) for load in LOADS for system in SYSTEMS]
    drawn = gnnsched_costs_picture({
        "accuracy": found, "costs": costs(rows), "paper_error": 0.08,
        "paper_cost": gnnsched_costs.PAPER_COST,
    })  # fmt: skip
    assert drawn.count("<circle") == 2 * len(found)
    bars = re.findall(r'<rect [^>]*width="34"', drawn)
    assert len(bars) == len(PARTS) * len(rows)
