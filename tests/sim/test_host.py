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


def test_the_server_takes_the_first_core_from_the_run_on_it():
    pair = [offered(0, 10), offered(1, 1, at_ms=2, prepare_ms=3)]
    assert max(answers(pair, DeviceModel(**FREE)).values())[0] == 10
    # 3 ms of preparing, on the core of the first run, which so ends 3 ms later.
    for cores in (1, 2):
        device = DeviceModel(**FREE, host=HostModel(cores=cores))
        ends = answers(pair, device)
        assert ends[0][0] == (14 if cores == 1 else 13), cores
    # A run on the other core loses nothing: 0 to 10 on core 0 less 3, and 1 to 9 on core 1.
    other = [offered(0, 10), offered(2, 8, at_ms=1), offered(1, 1, at_ms=2, prepare_ms=3)]
    assert answers(other, DeviceModel(**FREE, host=HostModel(cores=2)), lanes=3)[2][0] == 9


def test_the_client_goes_where_it_takes_nothing_from_others():
    # One run, which lies on the server's core: the client reads 5 ms of answers on the other.
    host = HostModel(2, read_ns=5 * MS)
    pair = [offered(0, 2), offered(1, 10, at_ms=1)]
    assert answers(pair, DeviceModel(**FREE, host=host), lanes=1)[1][0] == 12
    # Beside two runs it takes the core that is not the server's from one: 5 ms of its 20.
    pair = [offered(0, 2), offered(1, 20, at_ms=1), offered(2, 20, at_ms=1)]
    ends = answers(pair, DeviceModel(**FREE, host=host))
    assert sorted(end for end, _ in ends.values()) == [2, 22, 26]


def test_pieces_of_the_server_advance_alike():
    pair = [offered(0, 1, prepare_ms=2, answer_ms=1), offered(1, 1, prepare_ms=2, answer_ms=1)]
    assert [end for end, _ in answers(pair, DeviceModel(**FREE)).values()] == [4, 4]
    # Both are prepared by 4, run until 5 and then, sharing the core again, answered by 7.
    ample = DeviceModel(**FREE, host=HostModel(cores=8))
    assert [end for end, _ in answers(pair, ample).values()] == [7, 7]


def test_a_run_is_heard_of_by_the_server_before_its_lane_is_free():
    host = HostModel(8, hear_ns=2 * MS)
    pair = [offered(0, 1), offered(1, 1)]
    # Heard of by 3; the second then runs until 4 and is heard of by 6.
    assert answers(pair, DeviceModel(**FREE, host=host), lanes=1) == {0: (3, 0), 1: (6, 0)}


def test_client_and_server_work_before_a_request_counts_as_arrived_and_after_its_answer():
    host = HostModel(8, send_ns=MS, read_ns=3 * MS, receive_ns=2 * MS, finish_ns=5 * MS)
    pair = [offered(0, 1), offered(1, 1, at_ms=4)]
    # Sent by 1 and received by 3, answered at 4. The client then reads until 7 or sends: half as
    # fast each, the second is sent by 6, and received by 10 beside what the server finishes. That
    # goes on until 11, and the first lane is on its core.
    assert answers(pair, DeviceModel(**FREE, host=host)) == {0: (4, 3), 1: (12, 10)}


@pytest.mark.parametrize("runs", [(0, 0), (1, 0), (1, 1), (3, 2)])
@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("server", [False, True])
def test_no_more_is_given_than_there_are_cores_and_nothing_is_left_idle(server, client, runs):
    shares = HostModel(2).shares(server, client, runs)
    host = server * shares.server + client * shares.client
    assert host + sum(shares.runs) == pytest.approx(2)
    # With a core of its own for each, neither waits for the other.
    assert host == server + client


def test_on_one_core_server_and_client_share_it():
    shares = HostModel(1).shares(True, True, (1,))
    assert (shares.server, shares.client, shares.runs) == (0.5, 0.5, (0.0,))


def test_a_run_that_has_ended_cannot_be_stopped_any_more():
    # The second is more urgent and comes while the server hears of the end of the first.
    host = HostModel(1, hear_ns=2 * MS)
    requests = [offered(0, 10), offered(1, 1, at_ms=11)]
    simulation = Simulation(
        Scheduler(params(policy="slack", discipline="preemptive", lanes=2, parallelism=1,
                         can_suspend=True)),
        DeviceModel(**FREE, host=host),
    )  # fmt: skip
    simulation.run(requests)
    assert len(simulation.answered) == 2
