"""More load than the lanes can carry: what is still served in time, what is shed, what is left."""

import pytest

from serve.core.events import LimitsChanged
from serve.core.invariants import check_invariants
from serve.core.scheduler import Scheduler
from serve.core.types import Completed, Rejected, RejectReason
from serve.sim.device import DeviceModel
from serve.sim.engine import Simulation
from tests.builders import MS, params
from tests.sim.test_engine import mixed, offered

COUNT = 2500


def answers(requests, shed_late, changes=()):
    """Answer the requests; the scheduler hears of `changes` first."""
    chosen = params(
        policy="slack", discipline="preemptive", lanes=8, parallelism=2, can_suspend=True,
        shed_late=shed_late,
    )  # fmt: skip
    simulation = Simulation(Scheduler(chosen), DeviceModel())
    for change in changes:
        simulation.scheduler.handle(change, 0)
    simulation.run(requests)
    check_invariants(simulation.scheduler)
    return sorted(simulation.answered, key=lambda row: row.task.task_id)


def kept(rows):
    """(in time, with a result)."""
    done = [row for row in rows if isinstance(row.outcome, Completed)]
    return sum(row.cause is None for row in done), len(done)


@pytest.mark.parametrize("rho", [1.5, 3.0])
def test_shedding_serves_more_in_time_and_nearly_all_it_admits(rho):
    requests = mixed(rho, COUNT, 2, seed=1)
    in_time, admitted = kept(answers(requests, shed_late=True))
    in_time_before, _ = kept(answers(requests, shed_late=False))
    assert in_time > 1.2 * in_time_before
    assert in_time > 0.75 * admitted
    # No less than the lanes would carry in time at full load.
    assert in_time > 0.7 * COUNT / rho


def test_shed_requests_hear_why_and_when_to_come_back():
    rows = answers(mixed(3.0, COUNT, 2, seed=1), shed_late=True)
    refused = [row.outcome for row in rows if isinstance(row.outcome, Rejected)]
    assert {outcome.reason for outcome in refused} == {RejectReason.QUEUE_FULL}
    assert all(outcome.retry_after_ns >= MS for outcome in refused)
    assert any("as urgent" in outcome.message for outcome in refused)


def test_limits_that_change_count_as_those_from_the_start():
    requests = mixed(3.0, COUNT, 2, seed=1)
    change = LimitsChanged(max_queue=512, shed_late=True, run_limit_ns=None)
    rows = [answers(requests, True), answers(requests, False, [change])]
    assert [row.outcome for row in rows[0]] == [row.outcome for row in rows[1]]


def test_nothing_is_shed_below_full_load():
    rows = answers(mixed(0.5, COUNT, 2, seed=1), shed_late=True)
    assert kept(rows)[1] == COUNT


@pytest.mark.parametrize("shed_late", [False, True])
def test_targets_are_kept_again_soon_after_the_load_falls(shed_late):
    flood = mixed(3.0, COUNT, 2, seed=1)
    fallen_ms = flood[-1].task.arrived_ns / MS + 500
    calm = [offered(COUNT + i, 2, fallen_ms + 20 * i) for i in range(100)]
    rows = answers([*flood, *calm], shed_late)
    assert kept(rows[COUNT:])[0] >= 97
