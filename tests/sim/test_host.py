"""The host's own work on the cores of the lanes."""

import pytest

from serve.core.scheduler import Scheduler
from serve.core.types import Nanos
from serve.sim.device import DeviceModel, Offered
from serve.sim.engine import Simulation
from serve.sim.host import HostModel
from tests.builders import MS, params, task

FREE = {"switch_ns": Nanos(0)}


def offered(task_id, run_ms, at_ms=0, prepare_ms=0, answer_ms=0):
    given = task(task_id, run_ns=run_ms * MS, prepare_ns=0, arrived_ns=at_ms * MS)
    return Offered(given, run_ms * MS, Nanos(prepare_ms * MS), Nanos(answer_ms * MS))


def answers(requests, model, lanes=2):
    """When each request is answered and when it counted as arrived, in ms."""
    simulation = Simulation(Scheduler(params(policy="fifo", lanes=lanes)), model)
    simulation.run(requests)
    return {
        row.task.task_id: (row.answered_ns / MS, row.task.arrived_ns / MS)
        for row in simulation.answered
    }


def test_preparing_slows_runs_only_where_it_takes_their_core():
    pair = [offered(0, 10), offered(1, 1, at_ms=2, prepare_ms=3)]
    assert max(answers(pair, DeviceModel(**FREE)).values())[0] == 10
    two_cores = DeviceModel(**FREE, host=HostModel(cores=2))
    assert max(answers(pair, two_cores).values())[0] == 10
    # 3 ms of work at 3/4 of the core beside the run, which gets 1/4 of it for 4 ms: 3 ms lost. Then
    # two runs on one core, of which the device knows nothing (slowdown): no more is lost.
    one_core = DeviceModel(**FREE, host=HostModel(cores=1))
    assert max(answers(pair, one_core).values())[0] == 13


def test_the_server_does_one_thing_after_the_other():
    pair = [offered(0, 1, prepare_ms=2, answer_ms=1), offered(1, 1, prepare_ms=2, answer_ms=1)]
    assert [end for end, _ in answers(pair, DeviceModel(**FREE)).values()] == [4, 4]
    # Prepared by 2 and 4; the first one's answer is made while the other runs.
    ample = DeviceModel(**FREE, host=HostModel(cores=8))
    assert [end for end, _ in answers(pair, ample).values()] == [5, 6]


def test_client_and_server_work_before_a_request_counts_as_arrived_and_after_its_answer():
    host = HostModel(8, send_ns=MS, read_ns=3 * MS, receive_ns=2 * MS, finish_ns=5 * MS)
    pair = [offered(0, 1), offered(1, 1, at_ms=4)]
    # Sent by 1 and received by 3, answered at 4; then the server is busy until 9, the client
    # until 7, when it sends the second, which is received from 9 on.
    assert answers(pair, DeviceModel(**FREE, host=host)) == {0: (4, 3), 1: (12, 11)}


@pytest.mark.parametrize("executing", [1, 2, 5])
@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("cores", [1, 2, 4])
def test_no_more_is_given_than_there_are_cores(cores, processes, executing):
    of_process, of_run = HostModel(cores).shares(processes, executing)
    given = processes * of_process + min(executing, cores) * of_run
    assert given == pytest.approx(min(cores, processes + min(executing, cores)))
    assert 0 < of_run <= of_process <= 1
