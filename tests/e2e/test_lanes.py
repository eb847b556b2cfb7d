"""Lanes that die: of a signal, of the model's own doing; only what they ran notices."""

import os
import re
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from bench.kit.servers import ServerProcess
from serve.native import front_lacks
from tests.e2e.mischief import CRASH, DIE_ONCE, EXIT, HOLD, RAISE
from tests.e2e.support import GOOD, Troubled, assert_equal, infer, random_graph, raw_channel
from tests.processes import descendants, is_running, metric, row, wait_for
from tests.rpc.http2 import Http2

LANES = 2
SHIPPED = ("gcn", "gat")


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    return Troubled(tmp_path_factory.mktemp("repository"), *SHIPPED)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory, trouble):
    folder = tmp_path_factory.mktemp("troubled")
    sections = {"device": {"lanes": LANES}}
    with ServerProcess(folder, repository=trouble.root, sections=sections) as found:
        yield found


@pytest.fixture
def call(troubled, trouble):
    """Afterwards all lanes are back, nothing is reserved, and both lanes answer."""
    all_up(troubled)
    with raw_channel(troubled) as found:
        yield found
        all_up(troubled)
        wait_for(lambda: metric(troubled, "gnnserve_memory_reserved_bytes") == 0, "empty ledger")
        with ThreadPoolExecutor(LANES) as threads, trouble.holding() as graph:
            held = []
            for number in range(1, LANES + 1):
                held.append(threads.submit(infer, found, "mischief", graph))
                wait_for(lambda n=number: len(trouble.running()) == n, f"{number} runs")
        assert {one.result().parameters["lane"] for one in held} == set(range(LANES))


def all_up(server):
    wait_for(lambda: metric(server, "gnnserve_lanes_up") == LANES, "all lanes up")


def running(trouble, but=frozenset()):
    """The process that sleeps for a request, as soon as there is one."""
    return wait_for(lambda: trouble.running() - but, "a running request").pop()


def test_a_killed_lane_costs_no_answer(troubled, call, trouble, reference):
    """Small requests go on, on the other lane and later on the new one; the long one runs again."""
    small = [(SHIPPED[n % 2], random_graph(50 + n, 200, seed=n)) for n in range(120)]
    restarts = metric(troubled, "gnnserve_lane_restarts_total")
    with ThreadPoolExecutor(5) as threads, trouble.holding() as long:
        slow = threads.submit(infer, call, "mischief", long, tenant="killed")
        victim = running(trouble)
        assert victim in descendants(troubled.pid)
        answers = threads.map(lambda one: infer(call, *one, tenant="small"), small)
        os.kill(victim, signal.SIGKILL)
        for one, answer in zip(small, answers, strict=True):
            assert_equal(answer.outputs["output"], reference(*one))
        running(trouble, but={victim})
    assert_equal(slow.result().outputs["output"], trouble.expected(long))
    told = row(troubled, "tenant = ?", "killed")
    assert (told["status"], told["attempt"]) == ("OK", 2)
    all_up(troubled)
    assert metric(troubled, "gnnserve_lane_restarts_total") == restarts + 1
    assert victim not in descendants(troubled.pid)


def test_a_killed_fork_server_costs_no_answer(troubled, call, trouble, reference):
    """All lanes end with it; new ones answer what was running, and what waited."""
    with ThreadPoolExecutor(LANES + 4) as threads, trouble.holding() as long:
        slow = [threads.submit(infer, call, "mischief", long) for _ in range(LANES)]
        wait_for(lambda: len(trouble.running()) == LANES, "runs on all lanes")
        victims = trouble.running()
        waiting = [threads.submit(infer, call, "gcn", GOOD, tenant="waited") for _ in range(4)]
        wait_for(lambda: metric(troubled, "gnnserve_queue_depth") == 4, "requests that wait")
        (fork_server,) = (pid for pid in descendants(troubled.pid) if descendants(pid))
        os.kill(fork_server, signal.SIGKILL)
        running(trouble, but=victims)  # the others may be merged into that run
    for one in slow:
        assert_equal(one.result().outputs["output"], trouble.expected(long))
    for one in waiting:
        assert_equal(one.result().outputs["output"], reference("gcn", GOOD))


def test_a_request_that_loses_two_lanes_is_given_up(troubled, call, trouble):
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(infer, call, "mischief", trouble.graph(HOLD), tenant="twice")
        first = running(trouble)
        os.kill(first, signal.SIGKILL)
        os.kill(running(trouble, but={first}), signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            slow.result()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert re.search("lane . died while running it, as another did before", caught.value.details())
    told = row(troubled, "tenant = ?", "twice")
    assert (told["status"], told["reason"]) == ("UNAVAILABLE", "lane_lost")


@pytest.mark.parametrize("word", [EXIT, CRASH])
def test_a_model_that_ends_its_process_costs_that_request(call, trouble, word):
    with pytest.raises(grpc.RpcError) as caught:
        infer(call, "mischief", trouble.graph(word))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_model_that_ends_its_process_once_costs_nothing(troubled, call, trouble):
    graph = trouble.graph(DIE_ONCE)
    answer = infer(call, "mischief", graph, tenant="once")
    assert_equal(answer.outputs["output"], trouble.expected(graph))
    assert row(troubled, "tenant = ?", "once")["attempt"] == 2


def test_a_model_that_raises_is_told_with_its_words(troubled, call, trouble):
    before = lane_pids(troubled)
    with pytest.raises(grpc.RpcError) as caught:
        infer(call, "mischief", trouble.graph(RAISE, num_nodes=7), tenant="raised")
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "ValueError: asked to fail at 7 nodes"
    assert row(troubled, "tenant = ?", "raised")["reason"] == "model_error"
    assert lane_pids(troubled) <= before
    assert metric(troubled, "gnnserve_lanes_up") == LANES


def test_both_lanes_killed_while_idle_come_back(troubled, call):
    lanes = lane_pids(troubled)
    assert len(lanes) == LANES
    for pid in lanes:
        os.kill(pid, signal.SIGKILL)

    def replaced():
        pids = lane_pids(troubled)
        return len(pids) == LANES and pids.isdisjoint(lanes)

    wait_for(replaced, "other processes")


def lane_pids(server) -> set[int]:
    """Children of the fork server, which is the main process's child with children."""
    found = set()
    for child in descendants(server.pid):
        found |= descendants(child).keys()
    return found


@pytest.mark.skipif(bool(front_lacks()), reason=front_lacks())
def test_clients_that_take_descriptors_leave_enough_for_lanes_and_newcomers(
    troubled, call, trouble
):
    limits = resource.prlimit(troubled.pid, resource.RLIMIT_NOFILE)
    taken = len(os.listdir(f"/proc/{troubled.pid}/fd"))
    resource.prlimit(troubled.pid, resource.RLIMIT_NOFILE, (taken + 100, limits[1]))
    try:
        with ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(Http2(troubled.grpc_port))
            before = metric(troubled, "gnnserve_lane_restarts_total")
            victims = set(re.findall(r"lane \d: process (\d+) up", troubled.log.read_text()))
            alive = [int(pid) for pid in victims if is_running(int(pid))]
            assert len(alive) == 2
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            wait_for(
                lambda: (
                    metric(troubled, "gnnserve_lane_restarts_total") == before + 2
                    and metric(troubled, "gnnserve_lanes_up") == 2
                ),
                "the lanes",
            )
            with raw_channel(troubled) as newcomer:
                assert infer(newcomer, "gcn", GOOD).outputs["output"].shape == (30, 5)
    finally:
        resource.prlimit(troubled.pid, resource.RLIMIT_NOFILE, limits)
