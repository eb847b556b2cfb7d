"""A server's recording, sent again to it and simulated."""

import json
import stat
import subprocess
import sys
from collections import Counter

import pytest

from bench.kit.servers import ROOT, ServerProcess
from bench.kit.waiting import PATIENCE_S
from serve.client import Client
from serve.native import front_lacks
from serve.recording import TrafficRecording
from tests.e2e.support import random_graph

GRAPHS = ({"name": "community", "dataset": "community"},)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A server's folder with the recording of 24 requests, some of them by node ids."""
    folder = tmp_path_factory.mktemp("recorded")
    sections = {"report": {"record": "requests.jsonl"}, "models": {"load": ["gcn", "sage"]}}
    with (
        ServerProcess(folder, sections=sections, graphs=GRAPHS) as server,
        Client(server.target) as client,
    ):
        for number in range(8):
            graph = random_graph(40 + number, 201)
            client.infer("gcn", **graph.tensors, tenant="a")
            client.infer("sage", **graph.tensors, priority=2, qos_target_s=5)
            client.infer("gcn", graph="community", node_ids=[1, 2, number], fanouts=[4, 2])
    return folder


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_request_is_recorded_as_it_was_asked(recorded):
    path = recorded / "requests.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    requests = TrafficRecording.decode(path.read_bytes()).requests
    assert [one.model for one in requests] == ["gcn", "sage", "gcn"] * 8
    for number, (first, second, third) in enumerate(zip(*[iter(requests)] * 3, strict=True)):
        assert (first.nodes, first.edges, first.tenant) == (40 + number, 201, "a")
        assert (second.priority, second.target_us) == (2, 5_000_000)
        assert (third.graph, third.ids, third.fanouts) == ("community", 3, "4,2")
        assert third.nodes >= 3
        assert first.at_ns < second.at_ns < third.at_ns


@pytest.mark.parametrize("sender", [[], ["--native"]], ids=["python", "native"])
def test_it_is_sent_again(recorded, sender, tmp_path):
    if sender and (lacks := front_lacks()):
        pytest.skip(lacks)
    path = recorded / "requests.jsonl"
    sections = {"report": {"record": "again.jsonl"}, "models": {"load": ["gcn", "sage"]}}
    with ServerProcess(tmp_path, sections=sections, graphs=GRAPHS) as server:
        found = run(
            "loadgen", "--target", server.target, "--replay", path, "--speed", 2, "--json",
            "--timeout", PATIENCE_S, *sender,
        )  # fmt: skip
    assert found["by_status"] == {"OK": 24}
    before = TrafficRecording.decode(path.read_bytes())
    after = TrafficRecording.decode((tmp_path / "again.jsonl").read_bytes())

    def asked(recording):
        return Counter(
            (one.model, one.graph, one.ids or (one.nodes, one.edges), one.tenant, one.priority,
             one.target_us, one.fanouts)
            for one in recording.requests
        )  # fmt: skip

    assert asked(after) == asked(before)
    # Due times are exact, whenever they were then met.
    plan = before.trace().at_speed(2)
    assert [one.offset_ns for one in plan.items] == [
        round((one.at_ns - before.requests[0].at_ns) / 2) for one in before.requests
    ]


def test_it_is_simulated(recorded):
    arguments = ["--config", recorded / "server.toml", "--replay", recorded / "requests.jsonl"]
    found = run("serve", "simulate", *arguments, "--json")
    assert found["requests"] == found["completed"] == 24
    # A tenth of the time between arrivals on the same lanes is never less late.
    fast = run("serve", "simulate", *arguments, "--speed", 1e6, "--policy", "fifo", "--json")
    assert fast["requests"] == 24
    assert fast["jct_mean_ns"] > found["jct_mean_ns"]
