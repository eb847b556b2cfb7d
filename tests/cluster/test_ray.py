"""Servers on a Ray cluster: placed, drained, updated, replaced, and there when Ray is not."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.kit.result import ROOT
from bench.kit.servers import free_ports
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.client import Client
from serve.client.errors import ClientError
from serve.cluster.supervised import Supervised
from serve.models.community import community_graph
from tests.docs.pages import texts

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gnnserve[cluster]'")
pytestmark = pytest.mark.slow

MACHINES = ("one", "two", "three")
LARGE = {"x": np.zeros((5000, 32), np.float32), "edge_index": np.zeros((2, 20_000), np.int64)}
GRAPH = {"x": np.zeros((3, 32), np.float32), "edge_index": np.array([[0, 1], [1, 2]])}


def documented(mark):
    """Return the arguments of each `gnnserve cluster` of a block of the page."""
    (text,) = texts("docs/cluster.md", "sh", mark)
    lines = [shlex.split(line) for line in text.strip().splitlines()]
    assert all(line[:2] == ["gnnserve", "cluster"] for line in lines)
    return [line[2:] for line in lines]


class RayCluster:
    """Machines with Ray, and a cluster of two servers on them."""

    def __init__(self, folder):
        self.folder = folder
        self.config = folder / "gnnserve.toml"
        (self.port,) = free_ports(1)
        self.config.write_text(f"""
            [server]
            grpc_port = 0
            http_port = 0
            rest = false
            [models]
            repository = "{ROOT / "configs" / "models"}"
            load = ["gcn"]
            calibration_s = 1.0
            [device]
            memory_budget = "512 MiB"
            lanes = 1
        """)

    def start(self):
        command = [sys.executable, "-m", "tests.cluster.ray_machines", str(self.folder), *MACHINES]
        log = self.folder / "ray.log"
        with log.open("w") as file:
            self.machines = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                text=True,
            )  # fmt: skip
        self.address = self.machines.stdout.readline().strip()
        assert self.address, log.read_text()
        self.commands = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray_commands"], cwd=ROOT, text=True,
            env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments, code=0):
        self.commands.stdin.write(json.dumps([*arguments, "--address", self.address]) + "\n")
        self.commands.stdin.flush()
        ended, said, errors = json.loads(self.commands.stdout.readline())
        assert ended == code, said + errors
        return said if code == 0 else errors

    def status(self):
        _, status = documented("ray")
        return json.loads(self.run(*status, "--json"))

    def settled(self):
        """Return the status without servers that are lost; None while there is a problem."""
        found = self.status()
        found["servers"] = [one for one in found["servers"] if one["state"] == "ready"]
        return None if found["problem"] else found

    def states(self):
        """Return the states of all servers, in alphabetical order."""
        return sorted(one["state"] for one in self.status()["servers"])

    def fingerprints(self):
        """Return what each server was started with, those that are ending included."""
        return {one["fingerprint"] for one in self.status()["servers"]}

    def supervised(self, machine, what="server"):
        return Supervised(self.folder / machine / "default" / what)

    def holders(self):
        """Return the machines that have a server."""
        return [one for one in MACHINES if self.supervised(one).pid is not None]

    def coordinator(self):
        """Return the process of the coordinator; None while there is none."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (process / "cmdline").read_bytes().startswith(b"ray::Coordinator") and (
                    str(self.folder).encode() in (process / "environ").read_bytes()
                ):
                    return int(process.name)
        return None

    def kill(self, machine):
        """Lose a machine with all that is on it."""
        if (pid := self.supervised(machine).pid) is not None:
            os.kill(pid, signal.SIGKILL)
        self.kill_ray(machine)

    def kill_ray(self, machine):
        self.machines.stdin.write(f"kill {machine}\n")
        self.machines.stdin.flush()
        assert self.machines.stdout.readline().split() == ["kill", machine]

    def end(self):
        for process in (self.commands, self.machines):
            process.stdin.close()
            process.wait(PATIENCE_S)
            process.stdout.close()
        for machine in MACHINES:
            self.supervised(machine).end(PATIENCE_S)
        self.supervised("head", "front").end(PATIENCE_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    found = RayCluster(tmp_path_factory.mktemp("ray"))
    with ExitStack() as stack:
        stack.callback(found.end)
        found.start()
        found.run("up", "--config", str(found.config), "--replicas", "2", "--port", str(found.port))
        yield found


class Load:
    """Threads that ask without a pause through the front; each call has an answer or fails."""

    def __init__(self, cluster, may_fail=False, threads=2, graph=GRAPH, pause_s=0.02):
        self.failed, self.answered = [], 0
        self._may_fail = may_fail
        self._lock, self._over = threading.Lock(), threading.Event()
        self._client = Client(f"127.0.0.1:{cluster.port}", timeout_s=PATIENCE_S)
        ask = partial(self._ask, graph, pause_s)
        self._threads = [threading.Thread(target=ask) for _ in range(threads)]

    def _ask(self, graph, pause_s):
        while not self._over.wait(pause_s):
            try:
                answer = self._client.infer("gcn", **graph)
                assert answer.output.shape == (len(graph["x"]), 5)
            except (ClientError, AssertionError) as error:
                self.failed.append(error)
            with self._lock:
                self.answered += 1

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self.go_on()
        return self

    def go_on(self):
        wanted = self.answered + 20
        wait_for(lambda: self.answered >= wanted or self.failed, "answers")
        assert self._may_fail or not self.failed

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._client.close()


def test_up_starts_a_server_on_each_machine_and_a_front_before_them(cluster):
    found = cluster.status()
    assert found["endpoint"] == f"127.0.0.1:{cluster.port}"
    assert [row["state"] for row in found["servers"]] == ["ready", "ready"]
    assert len({row["machine"] for row in found["servers"]}) == 2
    assert len(cluster.holders()) == 2
    with Load(cluster) as load:
        load.go_on()
    for row in found["servers"]:
        with Client(row["address"]) as alone:
            assert alone.infer("gcn", **GRAPH).output.shape == (3, 5)


def test_a_server_that_no_machine_can_hold_is_refused_with_both_numbers(cluster):
    said = cluster.run(
        "up", "--config", str(cluster.config), "--name", "big", "--set",
        "device.memory_budget=5 GiB", code=2,
    )  # fmt: skip
    assert "a server needs 6 GiB of memory: 5 GiB for device.memory_budget" in said
    assert "the largest of 3 machines has 4 GiB" in said
    assert "there is no cluster 'big'" in cluster.run("status", "--name", "big", code=2)


def test_the_page_starts_ray_as_ray_understands():
    (text,) = texts("docs/cluster.md", "sh", "machines")
    said = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--help"],
        capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    ).stdout  # fmt: skip
    options = [word for word in text.split() if word.startswith("--")]
    assert options
    assert all(re.search(rf"{option}\b", said) for option in options)


def test_a_second_cluster_of_the_machines_comes_and_goes(cluster):
    (port,) = free_ports(1)
    second = ("--name", "second")
    cluster.run("up", "--config", str(cluster.config), "--port", str(port), *second)
    with Client(f"127.0.0.1:{port}") as client:
        assert client.infer("gcn", **GRAPH).output.shape == (3, 5)
    *_, down = documented("change")
    cluster.run(*down, *second)
    for machine in MACHINES:
        assert Supervised(cluster.folder / machine / "second" / "server").pid is None
    assert Supervised(cluster.folder / "head" / "second" / "front").pid is None
    assert [row["state"] for row in cluster.status()["servers"]] == ["ready", "ready"]


def test_servers_of_a_graph_that_is_shared_out_get_a_part_each(cluster):
    folder = cluster.folder / "papers"
    folder.mkdir()
    graph = community_graph()
    nodes = len(graph.x)
    np.savez(folder / "papers.npz", num_nodes=nodes, edge_index=graph.edge_index, x=graph.x)
    np.save(folder / "parts.npy", np.arange(nodes) % 2)
    config = folder / "gnnserve.toml"
    config.write_text(f"""{cluster.config.read_text()}
        [cluster.rows]
        listen = "127.0.0.1:0"
        patience_ms = 10000
        [[graph]]
        name = "papers"
        file = "papers.npz"
        parts = "parts.npy"
    """)
    (port,) = free_ports(1)
    papers = ("--config", str(config), "--name", "papers", "--port", str(port), "--cpus", "0")
    said = cluster.run("up", *papers, "--replicas", "1", code=2)
    assert "--replicas 1: graphs are shared out in 2 parts, and each needs a server" in said
    cluster.run("up", *papers, "--replicas", "2")
    found = json.loads(cluster.run("status", "--name", "papers", "--json"))["servers"]
    assert sorted(row["part"] for row in found) == [0, 1]
    assert re.search(r"part\W", cluster.run("status", "--name", "papers"))
    asked = {"graph": "papers", "node_ids": np.arange(40), "seed": 1}
    with ExitStack() as stack:
        a, b = (stack.enter_context(Client(row["address"])) for row in found)
        before = [one.infer("gcn", **asked).output.tobytes() for one in (a, b)]
        assert a.update_graph("papers", set_ids=[0], set_x=1 - graph.x[:1]).version == 2
        after = [one.infer("gcn", **asked).output.tobytes() for one in (a, b)]
    assert before[0] == before[1] != after[0] == after[1]
    cluster.run("down", "--name", "papers")


def test_a_drained_machine_gets_nothing_until_it_is_wanted_back(cluster):
    row = cluster.status()["servers"][0]
    _, drain, back, _ = documented("change")
    drain[drain.index("MACHINE")] = back[back.index("MACHINE")] = row["machine"]
    with Load(cluster) as load:
        assert cluster.run(*drain).split() == [row["address"]]
        assert [one["state"] for one in cluster.status()["servers"]] == ["draining", "ready"]
        load.go_on()
        cluster.run(*back)
        wait_for(lambda: cluster.status()["servers"][0]["state"] == "ready", "it to be back")
    assert "is not in the cluster; known: " in cluster.run("drain", "nobody", code=1)


def test_servers_pass_on_to_each_other_what_one_alone_can_answer(cluster):
    first, second = (row["address"] for row in cluster.status()["servers"])
    with Client(first, timeout_s=PATIENCE_S) as client:
        client.unload("gcn")
        found = wait_for(lambda: passed_on(client), "the request to be passed on")
        client.load("gcn")
        assert client.infer("gcn", **GRAPH).qos.hops == 0
    assert (found.hops, found.node.rpartition(":")[2]) == (1, second.rpartition(":")[2])


def passed_on(client):
    """Return the QoS facts of an answer; None while the other server does not say what it has."""
    with suppress(ClientError):
        return client.infer("gcn", **GRAPH).qos
    return None


def test_a_cluster_that_follows_load_grows_with_it(cluster):
    (scale,) = documented("scale")
    own = {"gnnserve.toml": str(cluster.config), "2..6": "2..3", "0.0.0.0": "127.0.0.1",
           "8000": str(cluster.port)}  # fmt: skip
    scale = [own.get(word, word) for word in scale]
    before = cluster.status()["servers"]
    cluster.run(*scale)
    assert cluster.status()["servers"] == before, "Ray has started servers anew: see `versioned`"
    with Load(cluster, threads=8, graph=LARGE, pause_s=0.0):
        wait_for(lambda: cluster.states() == ["ready"] * 3, "a third server")
    with Load(cluster) as load:
        cluster.run(*["2" if word == "2..3" else word for word in scale])
        wait_for(lambda: len(cluster.holders()) == 2, "one to end")
        load.go_on()


def test_an_update_replaces_every_server_and_fails_no_request(cluster):
    before = cluster.status()["servers"]
    with Load(cluster) as load:
        update, *_ = documented("change")
        cluster.run(*update, "--trial", "3s")
        load.go_on()
    after = cluster.status()["servers"]
    assert len(after) == 2
    assert not {one["fingerprint"] for one in before} & {one["fingerprint"] for one in after}
    with Client(f"127.0.0.1:{cluster.port}") as client:
        qos = client.infer("gcn", **GRAPH).qos
    assert qos.qos_target_us == pytest.approx(3 * qos.solo_estimate_us, rel=0.01)


def test_an_update_that_does_worse_is_taken_back(cluster):
    before = cluster.fingerprints()
    with Load(cluster, may_fail=True) as load:
        said = cluster.run("update", "--set", 'models.load=["sage"]', "--trial", "10m", code=1)
        assert re.search(
            r"the update was taken back: (\d+) of its last \1 requests failed .*, 0 of \d+ of the "
            "other servers'", " ".join(said.split())
        )  # fmt: skip
        # A model that is not loaded is UNAVAILABLE: clients ask again, mostly another server.
        assert {error.code for error in load.failed} <= {"UNAVAILABLE"}
    with Load(cluster) as load:
        load.go_on()
    wait_for(lambda: cluster.fingerprints() == before, "the server on trial to have ended")
    assert "requests failed" in cluster.status()["taken_back"]


def test_an_update_that_does_not_start_is_taken_back(cluster):
    before = cluster.fingerprints()
    with Load(cluster) as load:
        said = cluster.run("update", "--set", 'models.load=["nobody"]', code=1)
        assert "the update was taken back: a server did not start with it: " in said
        load.go_on()
    wait_for(lambda: cluster.fingerprints() == before, "all to be as they were")


def test_a_server_that_is_killed_comes_back_and_a_machine_that_is_lost_is_replaced(cluster):
    lost, stays = cluster.holders()
    (spare,) = set(MACHINES) - {lost, stays}
    with Load(cluster) as load:
        cluster.kill(lost)
        load.go_on()
        wait_for(lambda: cluster.supervised(spare).pid, "a server on the spare machine")
        wait_for(
            lambda: cluster.states() == ["ready", "ready", "suspect"],
            "two to be ready beside the one that was lost",
        )
        load.go_on()


def test_a_coordinator_that_is_lost_comes_back_and_knows_all(cluster):
    before = wait_for(cluster.settled, "the end of all changes")
    front = cluster.supervised("head", "front").pid
    with Load(cluster) as load:
        os.kill(cluster.coordinator(), signal.SIGKILL)
        load.go_on()
        wait_for(lambda: cluster.coordinator(), "another")
        load.go_on()
        wait_for(lambda: cluster.settled() == before, "it to know all")
        load.go_on()
    assert cluster.supervised("head", "front").pid == front


def test_where_there_is_no_ray_it_says_so_at_once(cluster):
    done = subprocess.run(
        [sys.executable, "-m", "serve", "cluster", "status", "--address", "127.0.0.1:1"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: no Ray cluster at '127.0.0.1:1': " in done.stderr


def test_requests_go_on_when_all_of_ray_is_killed(cluster):
    with Load(cluster) as load:
        for machine in ("head", *cluster.holders()):
            cluster.kill_ray(machine)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 5:
            load.go_on()
        # What is kept is kept still.
        server = cluster.supervised(cluster.holders()[0])
        front = cluster.supervised("head", "front")
        assert server.pid
        assert front.pid
