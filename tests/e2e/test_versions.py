"""Versions of a model shared out, rolled out and rolled back under load, without a failure."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench.kit.servers import ServerProcess
from serve.client import Client, Request
from tests.processes import http_get, wait_for

#: The output of version v is v for every node.
CODE = """\
import torch


class Constant(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x, edge_index):
        return self.value.expand(x.shape[0], 2) + 0.0 * x.sum()
"""
X = np.ones((4, 3), np.float32)
EDGES = np.array([[0, 1, 2], [1, 2, 3]])
#: Requests a second in all, over so many clients.
RATE, CLIENTS = 100.0, 4


def write_version(root, version, value=None):
    folder = root / "m" / str(version)
    folder.mkdir(parents=True)
    value = float(version) if value is None else value
    save_file({"value": torch.full((2,), value)}, folder / "weights.safetensors")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    found = tmp_path_factory.mktemp("versions")
    for version in (1, 2):
        write_version(found, version)
    (found / "m" / "model.py").write_text(CODE)
    (found / "m" / "config.toml").write_text(
        '[model]\nfactory = "./model.py:Constant"\nnum_features = 3\n'
    )
    return found


@pytest.fixture(scope="module")
def server(root, tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("server"), repository=root) as found:
        yield found


@pytest.fixture
def client(server):
    with Client(server.target) as found:
        yield found


@pytest.fixture
def admin(server):
    with Client(server.target) as found:
        yield found
        found.split("m", {})


def ask(client, request_id, **fields):
    """The version that answered, which its output tells too."""
    request = Request(model="m", x=X, edge_index=EDGES, request_id=request_id, **fields)
    answer = client.ask(request)
    version = answer.version
    assert (answer.output == float(version)).all(), (version, answer.output)
    return version


class Load:
    """Clients that ask at a rate, and what they got."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.failures: list[Exception] = []

    def since(self, count):
        """Versions of the answers after the first `count`."""
        return self.versions[count:]


@contextmanager
def loaded(server) -> Iterator[Load]:
    """Ask for the whole block; no request fails, whatever happens in it."""
    load, stop = Load(), threading.Event()

    def run(number: int) -> None:
        sent = 0
        with Client(server.target) as client:
            while not stop.wait(CLIENTS / RATE):
                sent += 1
                try:
                    load.versions.append(ask(client, f"{number}-{sent}"))
                except Exception as error:
                    load.failures.append(error)

    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(run, number) for number in range(CLIENTS)]
        try:
            yield load
        finally:
            stop.set()
        for one in running:
            one.result()
    assert load.failures == []


def test_the_same_id_gets_the_same_version_on_every_way(server, client, admin):
    admin.split("m", {1: 50, 2: 50})
    ids = [f"id-{number}" for number in range(60)]
    first = [ask(client, one) for one in ids]
    assert set(first) == {"1", "2"}
    assert [ask(client, one) for one in ids] == first
    requests = [Request(model="m", x=X, edge_index=EDGES, request_id=one) for one in ids]
    streamed = {position: answer.version for position, answer in client.infer_stream(requests)}
    assert [streamed[position] for position in range(len(ids))] == first
    for one in ids[:6]:
        assert {ask(client, one, version=version) for version in "12"} == {"1", "2"}


def test_requests_without_an_id_are_shared_out(client, admin):
    admin.split("m", {1: 50, 2: 50})
    counts = Counter(ask(client, "") for _ in range(60))
    assert min(counts["1"], counts["2"]) > 5


def test_a_rollout_and_a_rollback_lose_no_request(server, root, admin):
    def answers(*wanted):
        """Wait until the newest answers are of these versions, of each one."""
        count = len(load.versions)
        wait_for(
            lambda: load.failures or set(wanted) <= set(load.since(count)), f"answers of {wanted}"
        )
        count = len(load.versions)
        wait_for(lambda: load.failures or len(load.since(count)) >= 30, "more answers")
        assert load.failures == []
        return set(load.since(count))

    with loaded(server) as load:
        admin.split("m", {1: 100})
        assert answers("1") == {"1"}
        write_version(root, 3)
        admin.load("m")
        assert answers("1") == {"1"}
        for percent in (10, 50):
            admin.split("m", {1: 100 - percent, 3: percent}, canary=3)
            assert answers("1", "3") <= {"1", "3"}
        admin.split("m", {3: 100})
        assert answers("3") == {"3"}
        admin.roll_back("m")
        assert answers("1", "3") <= {"1", "3"}
        admin.split("m", {1: 100})
        assert answers("1") == {"1"}
    assert len(load.versions) > 150


def test_a_canary_that_answers_nan_takes_itself_back(server, root, admin):
    write_version(root, 4, value=float("nan"))
    admin.load("m")
    admin.split("m", {1: 50, 4: 50}, canary=4)
    with Client(server.target) as client:
        for number in range(400):
            client.ask(Request(model="m", x=X, edge_index=EDGES, request_id=f"nan-{number}"))
            (facts,) = admin.versions("m")
            if facts.taken_back:
                break
    assert "failed" in facts.taken_back
    assert facts.rules.split == {"1": 100.0}
    with Client(server.target) as client:
        assert {ask(client, f"nan-{number}") for number in range(40)} == {"1"}
    assert "the canary, version 4, is taken back" in server.log.read_text()


def test_a_shadow_is_compared_and_heard_of_by_nobody(server, admin):
    admin.split("m", {1: 100})
    admin.shadow("m", 2)
    try:
        with loaded(server) as load:
            wait_for(
                lambda: load.failures or admin.versions("m")[0].shadow.compared >= 20, "shadows"
            )
        assert set(load.versions) == {"1"}
        counts = admin.versions("m")[0].shadow
        assert counts.different == counts.compared
        assert (counts.most_absolute, counts.most_relative) == (1.0, 1.0)
        assert counts.failed == 0
        _, text = http_get(server, "/metrics")
        labels = 'model="m",outcome="different",version="2"'
        (runs,) = re.findall(rf"^gnnserve_shadow_runs_total{{{labels}}} (\S+)$", text, re.M)
        assert float(runs) >= 20
    finally:
        admin.shadow("m", 0)


def test_rules_outlast_the_server(root, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    with ServerProcess(tmp_path / "a", repository=root) as server, Client(server.target) as admin:
        admin.split("m", {2: 100})
    with ServerProcess(tmp_path / "b", repository=root) as server, Client(server.target) as client:
        assert {ask(client, f"{number}") for number in range(10)} == {"2"}
