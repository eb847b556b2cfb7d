"""Stopping: what was accepted is answered. Being killed: what is left behind."""

import os
import re
import signal
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from bench.kit.servers import ServerProcess
from tests.e2e.mischief import HOLD
from tests.e2e.support import GOOD, Troubled, hanging_model, infer, random_graph, raw_channel
from tests.processes import (
    PATIENCE_S,
    descendants,
    http_get,
    is_running,
    metric,
    rows,
    shared_memory_names,
    wait_for,
)

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def trouble(tmp_path):
    return Troubled(tmp_path, "gcn")


def to_main_process(server):
    os.kill(server.pid, signal.SIGTERM)


def to_whole_group(server):
    """As systemd does it."""
    os.killpg(server.pid, signal.SIGTERM)


def after_what_ends_nothing(server):
    """SIGTERM, after signals that must end none of its processes."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        os.kill(server.pid, number)
    os.killpg(server.pid, signal.SIGHUP)
    wait_for(lambda: "SIGALRM is ignored" in server.log.read_text(), "the last of them")
    os.killpg(server.pid, signal.SIGTERM)


@pytest.mark.parametrize("terminate", [to_main_process, to_whole_group, after_what_ends_nothing])
def test_sigterm_under_load_loses_nothing(tmp_path, trouble, terminate):
    """Long requests run, others queue behind them, and clients go on asking throughout."""
    codes: list[str] = []
    given_up = threading.Event()

    with (
        ServerProcess(tmp_path, repository=trouble.root, own_group=True) as server,
        raw_channel(server) as call,
        ThreadPoolExecutor(40) as threads,
        ExitStack() as at_exit,
    ):
        at_exit.callback(given_up.set)

        def ask_until_refused(number: int) -> None:
            while not given_up.is_set():
                try:
                    infer(call, "gcn", random_graph(100 + number, 2_000, seed=number))
                    codes.append("OK")
                except grpc.RpcError as error:
                    codes.append(error.code().name)
                    return

        with trouble.holding() as long:
            slow = [threads.submit(infer, call, "mischief", long, tenant="long") for _ in range(6)]
            wait_for(lambda: len(trouble.running()) == 2, "two running requests")
            wait_for(lambda: metric(server, "gnnserve_queue_depth") == 4, "four that wait")
            clients = [threads.submit(ask_until_refused, number) for number in range(32)]
            terminate(server)
            wait_for(lambda: "draining" in server.log.read_text(), "the drain")
        for one in clients:
            one.result()
        # None of them had ended at the signal.
        for one in slow:
            assert one.result().outputs["output"].shape == (3, 2)
        assert server.wait() == 0
    ended, answered = Counter(codes), Counter(told["status"] for told in rows(server))
    assert answered["OK"] == ended["OK"] + len(slow)
    assert ended["UNAVAILABLE"] == len(clients)
    assert answered.keys() <= {"OK", "UNAVAILABLE"}
    assert '"stopped; 0 requests were given up on"' in server.log.read_text()


def test_a_stop_gives_up_on_what_takes_too_long(tmp_path, trouble):
    """It waits out the delay for load balancers before it drains."""
    sections = {"server": {"drain_timeout_s": 1.0, "shutdown_delay_s": 0.1}}
    with (
        ServerProcess(tmp_path, repository=trouble.root, sections=sections) as server,
        raw_channel(server) as call,
        ThreadPoolExecutor(1) as threads,
    ):
        slow = threads.submit(infer, call, "mischief", trouble.graph(HOLD))
        wait_for(trouble.running, "a running request")
        processes = descendants(server.pid)
        assert server.stop() == 0
        with pytest.raises(grpc.RpcError) as caught:
            slow.result()
    assert caught.value.code() in (UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert [told["status"] for told in rows(server)] == ["CANCELLED"]
    told_last = server.log.read_text()
    assert told_last.index("serving for 0.1 s") < told_last.index("gave up on 1 requests")
    wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")


def test_a_stop_may_serve_on_while_load_balancers_look_away(tmp_path):
    sections = {"server": {"shutdown_delay_s": 2 * PATIENCE_S}}
    with ServerProcess(tmp_path, sections=sections) as server, raw_channel(server) as call:
        to_main_process(server)
        wait_for(lambda: f"serving for {2 * PATIENCE_S:g} s" in server.log.read_text(), "the delay")
        assert http_get(server, "/v2/health/ready")[0] == 503
        assert infer(call, "gcn", GOOD).outputs["output"].shape == (30, 5)
        assert server.stop() == 128 + signal.SIGTERM  # the second signal


def test_a_second_signal_stops_at_once(tmp_path, trouble):
    with (
        ServerProcess(tmp_path, repository=trouble.root) as server,
        raw_channel(server) as call,
        ThreadPoolExecutor(1) as threads,
    ):
        slow = threads.submit(infer, call, "mischief", trouble.graph(HOLD))
        wait_for(trouble.running, "a running request")
        processes = descendants(server.pid)
        to_main_process(server)
        wait_for(lambda: "draining" in server.log.read_text(), "the drain")
        assert server.stop() == 128 + signal.SIGTERM
        with pytest.raises(grpc.RpcError):
            slow.result()
    wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")


def test_sigterm_while_starting_stops_cleanly(tmp_path, trouble):
    trouble.bar_loading()
    with ServerProcess(tmp_path, repository=trouble.root).starting() as server:
        wait_for(lambda: "lane 0: process" in server.log.read_text(), "the first lane")
        processes = descendants(server.pid)
        assert len(processes) >= 2
        to_main_process(server)
        trouble.let_load()
        assert server.wait() == 0
    assert not server.said_ready
    wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")


@pytest.fixture
def temporary():
    """An empty folder for temporary files, with a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


def lane_pid(server):
    """Process id of the first lane."""
    return int(re.findall(r"lane 0: process (\d+)", server.log.read_text())[0])


def test_a_stop_that_hangs_is_ended_by_force_and_leaves_nothing(tmp_path, trouble):
    """The process that all lanes come from stands still, so nobody tells that they have ended."""
    sections = {"server": {"drain_timeout_s": 1.0, "stop_timeout_s": 3.0}}
    with ServerProcess(tmp_path, repository=trouble.root, sections=sections) as server:
        processes = descendants(server.pid)
        stat = Path(f"/proc/{lane_pid(server)}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGSTOP)
        code = server.stop()
    log = server.log.read_text()
    by_force = "not stopped within 4 s, ending by force; requests in flight: 0" in log
    assert (code, by_force) in ((1, True), (0, False))
    wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")


def test_a_model_that_hangs_while_starting_does_not_keep_it_from_stopping(tmp_path, trouble):
    hanging_model(trouble.root, "a_hangs")
    with ServerProcess(tmp_path, repository=trouble.root).starting() as server:
        wait_for(lambda: "a_hangs:1: calibrating" in server.log.read_text(), "the load")
        processes = descendants(server.pid)
        assert server.stop() == 0
    assert not server.said_ready
    wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")


def test_kill_leaves_rows_and_nothing_else(tmp_path, trouble, temporary):
    names = shared_memory_names()
    environment = {"TMPDIR": str(temporary)}
    options = {"repository": trouble.root, "environment": environment}
    with (
        ServerProcess(tmp_path, **options, own_group=True) as server,
        raw_channel(server) as call,
        ThreadPoolExecutor(2) as threads,
    ):
        for number in range(20):
            infer(call, "gcn", GOOD, tenant=f"t{number}")
        # A second is what may be lost, or what it takes on this machine.
        wait_for(lambda: len(rows(server)) == 20, "a row for each")
        slow = [threads.submit(infer, call, "mischief", trouble.graph(HOLD)) for _ in "ab"]
        wait_for(lambda: len(trouble.running()) == 2, "two running requests")
        processes = descendants(server.pid)
        assert len(processes) >= 3
        assert trouble.running() <= processes.keys()
        server.kill()
        wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")
        for one in slow:
            with pytest.raises(grpc.RpcError) as caught:
                one.result()
            assert caught.value.code() is UNAVAILABLE
    assert shared_memory_names() <= names
    assert [told["tenant"] for told in rows(server)] == [f"t{number}" for number in range(20)]
    # The next server takes the same database over, and the same ports; and it tidies up.
    with ServerProcess(tmp_path, **options) as server, raw_channel(server) as call:
        infer(call, "gcn", GOOD)
    assert list(temporary.iterdir()) == []
    assert len(rows(server)) == 21
    assert not re.search("corrupt|cannot", server.log.read_text())


@pytest.mark.slow
def test_restarts_of_lanes_leave_no_temporary_files(tmp_path, trouble, temporary):
    """Neither while the server runs nor afterwards."""

    def left():
        return sum(path.is_file() for path in temporary.rglob("*"))

    options = {"repository": trouble.root, "environment": {"TMPDIR": str(temporary)}}
    with ServerProcess(tmp_path, **options) as server, raw_channel(server) as call:

        def lane_pids():
            started = re.findall(r"lane (\d): process (\d+) up", server.log.read_text())
            return {int(pid) for pid in dict(started).values()}

        at_first = left()
        for restarts in range(2, 13, 2):
            for pid in lane_pids():
                os.kill(pid, signal.SIGKILL)
            wait_for(
                lambda restarts=restarts: (
                    metric(server, "gnnserve_lane_restarts_total") == restarts
                    and metric(server, "gnnserve_lanes_up") == 2
                ),
                f"{restarts} restarts",
            )
        assert len(list(temporary.iterdir())) == 1
        # Of two lanes that start at once, either may leave the other's predecessor to the next.
        assert left() <= at_first + 2
        infer(call, "gcn", GOOD)
    assert list(temporary.iterdir()) == []
