"""Under `preemptive`, long runs stand aside for others, and stopped lanes end as all do."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from bench.kit.servers import ServerProcess
from tests.e2e.mischief import HOLD
from tests.e2e.support import GOOD, Troubled, assert_equal, infer, raw_channel
from tests.processes import descendants, is_running, metric, rows, wait_for

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def trouble(tmp_path):
    return Troubled(tmp_path, "gcn")


@pytest.fixture
def server(tmp_path, trouble):
    with preemptive(tmp_path, trouble) as found:
        yield found


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """A server, and its trouble, for tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("lasting")
    trouble = Troubled(folder, "gcn")
    with preemptive(folder, trouble) as found:
        yield found, trouble


def preemptive(folder, trouble):
    return ServerProcess(folder, policy="slack", discipline="preemptive", repository=trouble.root)


def is_stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


@contextmanager
def one_suspended(server, trouble) -> Iterator[tuple[int, list[Future]]]:
    """The process of a suspended run, and all runs: one more than there are cores."""
    graph = trouble.graph(HOLD)
    with raw_channel(server) as call, ThreadPoolExecutor(CORES + 1) as threads:
        runs = []
        for number in range(1, CORES + 2):
            runs.append(threads.submit(infer, call, "mischief", graph, tenant="held"))
            wait_for(lambda n=number: len(trouble.running()) == n, f"{number} runs")
        stopped = wait_for(lambda: set(filter(is_stopped, trouble.running())), "a stopped lane")
        yield stopped.pop(), runs


def test_short_requests_pass_long_ones_which_are_answered_all_the_same(lasting, reference):
    server, trouble = lasting
    with raw_channel(server) as call, ThreadPoolExecutor(CORES) as threads:
        with trouble.holding() as graph:
            held = [threads.submit(infer, call, "mischief", graph) for _ in range(CORES)]
            wait_for(lambda: len(trouble.running()) == CORES, "a run on every core")
            for _ in range(20):
                answer = infer(call, "gcn", GOOD)
                assert_equal(answer.outputs["output"], reference("gcn", GOOD))
        for one in held:
            assert_equal(one.result().outputs["output"], trouble.expected(graph))
    wait_for(lambda: metric(server, "gnnserve_memory_reserved_bytes") == 0, "an empty ledger")


def test_a_suspended_lane_that_is_killed_has_its_task_run_again(lasting):
    server, trouble = lasting
    before = metric(server, "gnnserve_lane_restarts_total")
    with one_suspended(server, trouble) as (stopped, runs), trouble.holding():
        os.kill(stopped, signal.SIGKILL)
        wait_for(lambda: metric(server, "gnnserve_lane_restarts_total") > before, "the restart")
    for run in runs:
        assert run.result().outputs["output"].shape == (3, 2)
    held = "tenant = 'held'"
    wait_for(lambda: len(rows(server, held)) == len(runs), "all rows")
    assert sorted(told["attempt"] for told in rows(server, held)) == [*[1] * CORES, 2]


def test_a_stop_answers_suspended_requests_too(server, trouble):
    with one_suspended(server, trouble) as (_, runs), trouble.holding():
        os.kill(server.pid, signal.SIGTERM)
        wait_for(lambda: "draining" in server.log.read_text(), "the drain")
    for run in runs:
        assert run.result().outputs["output"].shape == (3, 2)
    assert server.wait() == 0
    assert [told["status"] for told in rows(server)] == ["OK"] * len(runs)


def test_stopped_lanes_end_when_the_server_is_killed(server, trouble):
    with one_suspended(server, trouble) as (stopped, runs):
        processes = descendants(server.pid)
        assert stopped in processes
        server.kill()
        wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")
        for run in runs:
            with pytest.raises(grpc.RpcError):
                run.result()
