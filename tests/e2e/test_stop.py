"""Stopping: what was accepted is answered. Being killed: what is left behind."""

import os
import re
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.e2e.mischief import HOLD, SLEEP
from tests.e2e.support import GOOD, Troubled, infer, random_graph, raw_channel
from tests.harness import ServerProcess
from tests.outside import descendants, is_running, rows, shared_memory_names, wait_for

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def trouble(tmp_path):
    return Troubled(tmp_path, "gcn")


def to_main_process(server):
    os.kill(server.pid, signal.SIGTERM)


def to_whole_group(server):
    """As systemd does it."""
    os.killpg(server.pid, signal.SIGTERM)


@pytest.mark.parametrize("terminate", [to_main_process, to_whole_group])
def test_sigterm_under_load_loses_nothing(tmp_path, trouble, terminate):
    """Long requests run, others queue behind them, and clients go on asking throughout."""
    ended: Counter[str] = Counter()

    with (
        ServerProcess(tmp_path, repository=trouble.root, own_group=True) as server,
        raw_channel(server) as call,
        ThreadPoolExecutor(40) as threads,
    ):

        def ask_until_refused(number: int) -> None:
            while True:
                try:
                    infer(call, "gcn", random_graph(100 + number, 2_000, seed=number))
                    ended["OK"] += 1
                except grpc.RpcError as error:
                    ended[error.code().name] += 1
                    return

        long = trouble.graph(SLEEP + 1.0)
        slow = [threads.submit(infer, call, "mischief", long, tenant="long") for _ in range(6)]
        wait_for(lambda: len(trouble.running()) == 2, "two running requests")
        clients = [threads.submit(ask_until_refused, number) for number in range(32)]
        terminate(server)
        for one in clients:
            one.result()
        # Six seconds of work on two lanes, of which none had ended at the signal.
        for one in slow:
            assert one.result().outputs["output"].shape == (3, 2)
        assert server.wait() == 0
    answered = Counter(told["status"] for told in rows(server))
    assert answered["OK"] == ended["OK"] + len(slow)
    assert ended["UNAVAILABLE"] == len(clients)
    assert answered.keys() <= {"OK", "UNAVAILABLE"}
    assert '"stopped; 0 requests were given up on"' in server.log.read_text()


def test_a_stop_gives_up_on_what_takes_too_long(tmp_path, trouble):
    sections = {"server": {"drain_timeout_s": 1.0}}
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
    assert "gave up on 1 requests" in server.log.read_text()
    wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")


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


def test_sigterm_while_starting_stops_cleanly(tmp_path):
    with ServerProcess(tmp_path).starting() as server:
        wait_for(lambda: "lane 0: process" in server.log.read_text(), "the first lane")
        processes = descendants(server.pid)
        assert len(processes) >= 2
        assert server.stop() == 0
    assert not server.said_ready
    wait_for(lambda: not any(map(is_running, processes)), "the end of all processes")


@pytest.fixture
def temporary():
    """An empty folder for temporary files, with a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


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
        # A second is what may be lost.
        time.sleep(1.0)
        slow = [threads.submit(infer, call, "mischief", trouble.graph(HOLD)) for _ in "ab"]
        wait_for(lambda: len(trouble.running()) == 2, "two running requests")
        processes = descendants(server.pid)
        assert len(processes) >= 3
        assert trouble.running() <= processes.keys()
        server.kill()
        wait_for(lambda: not any(map(is_running, processes)), "the end of all processes", 5)
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
