"""Two real servers, one killed, frozen and stopped under load: each call has one answer.

A quick run of `bench.cluster.soak` tries it too, with every kind of disturbance in turn.
"""

import os
import signal
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from bench.kit.servers import ServerProcess
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.client import Client
from serve.client.errors import ClientError, NotFound
from serve.client.requests import Request
from tests.client.small_server import look_patiently

NODES, EDGES = 40, 120
CASES = 5


def graph(case):
    rng = np.random.default_rng(case)
    x = rng.standard_normal((NODES + case, 32), np.float32)
    return {"x": x, "edge_index": rng.integers(0, NODES, (2, EDGES))}


class Callers:
    """Threads that ask without a pause and compare each answer."""

    def __init__(self, client, expected):
        self._client, self._expected = client, expected
        self._over = threading.Event()
        self.failed, self.answered = [], [0] * 4
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(4)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number):
        case = number
        while not self._over.is_set():
            case = (case + 1) % CASES
            try:
                answer = self._client.infer("gcn", **graph(case))
            except ClientError as error:
                self.failed.append(error)
                continue
            np.testing.assert_allclose(answer.output, self._expected[case], rtol=1e-3, atol=1e-4)
            self.answered[number] += 1

    def go_on(self):
        """Return once every thread has had ten answers more."""
        wanted = [count + 10 for count in self.answered]
        wait_for(
            lambda: self.failed or all(a >= w for a, w in zip(self.answered, wanted, strict=True)),
            "answers",
        )
        assert not self.failed

    def end(self):
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.mark.slow
def test_kill_freeze_and_stop_fail_no_call(tmp_path, monkeypatch):
    look_patiently(monkeypatch)
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    sections = {"models": {"load": ["gcn"]}}
    first, second = (ServerProcess(folder, sections=sections, own_group=True) for folder in folders)
    with ExitStack() as stack:
        stack.enter_context(first)
        with Client(first.target) as alone:
            expected = [alone.infer("gcn", **graph(case)).output for case in range(CASES)]
        stack.enter_context(second)
        target = f"{first.target},{second.target}"
        client = stack.enter_context(Client(target, timeout_s=PATIENCE_S))
        callers = Callers(client, expected)
        stack.callback(callers.end)
        callers.go_on()
        # The kernel ends its lanes with it.
        first.kill()
        callers.go_on()
        first.start()
        first.wait_ready()
        os.killpg(second.pid, signal.SIGSTOP)
        try:
            callers.go_on()
        finally:
            os.killpg(second.pid, signal.SIGCONT)
        callers.go_on()
        # Stopped in order, it answers what it has.
        assert first.stop() == 0
        callers.go_on()
        callers.end()
        assert not callers.failed


@pytest.mark.slow
def test_node_ids_go_to_the_server_that_holds_their_graph(tmp_path, monkeypatch):
    look_patiently(monkeypatch)
    held = {"name": "here", "dataset": "community"}
    with ExitStack() as stack:
        targets = []
        for number, graphs in enumerate(((), (held,))):
            folder = tmp_path / str(number)
            folder.mkdir()
            sections = {"models": {"load": ["gcn"]}}
            server = ServerProcess(folder, sections=sections, graphs=graphs)
            targets.append(stack.enter_context(server).target)
        client = stack.enter_context(Client(",".join(targets), timeout_s=PATIENCE_S))
        wanted = [Request(model="gcn", graph="here", node_ids=[n], seed=1) for n in range(12)]
        alone = stack.enter_context(Client(targets[1]))
        for request in wanted:
            answer = client.ask(request)
            assert answer.qos.machine == targets[1]
            np.testing.assert_array_equal(answer.output, alone.ask(request).output)
        for position, answer in client.infer_stream(wanted):
            assert answer.qos.machine == targets[1]
            assert answer.qos.sampled_nodes == alone.ask(wanted[position]).qos.sampled_nodes
        with pytest.raises(NotFound, match="graph 'nowhere' is on none of 2 machines"):
            client.infer("gcn", graph="nowhere", node_ids=[1])
