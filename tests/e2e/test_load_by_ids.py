"""Loads of requests by node ids, of a graph with several types and of one with one type."""

import json
import subprocess
import sys

import numpy as np
import pytest

from bench.kit import academic
from bench.kit.servers import ROOT, ServerProcess
from bench.kit.waiting import PATIENCE_S
from serve.graphs.academic import academic_graph
from serve.native import front_lacks
from serve.workload import Trace

TYPED = ("--graph", "academic", "--node-type", "paper", "--ids", "1-20", "--fanouts", "4,3")


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """A server of models of typed nodes, and their graph."""
    folder = tmp_path_factory.mktemp("typed")
    for name in academic.MODELS:
        academic.write(folder / "models", name)
    np.savez(folder / "academic.npz", **academic_graph(300))
    graphs = ({"name": "academic", "file": "academic.npz"},)
    with ServerProcess(folder, repository=folder / "models", graphs=graphs) as running:
        yield running


def run(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def load(server, *arguments):
    ended = run(
        "-m", "loadgen", "--target", server.target, "--json", "--timeout", PATIENCE_S, *arguments
    )
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else ended.stderr


@pytest.mark.parametrize("sender", [[], ["--native"]], ids=["python", "native"])
def test_nodes_of_one_type_are_asked_about(typed, sender, tmp_path):
    if sender and (lacks := front_lacks()):
        pytest.skip(lacks)
    saved = tmp_path / "a.trace"
    asked = *TYPED, "--rho", 0.2, "--requests", 30
    code, seen = load(typed, *asked, "--save-trace", saved, *sender)
    assert code == 0, seen
    assert seen["by_status"] == {"OK": 30}
    assert set(seen["by_model"]) == set(academic.MODELS)
    assert seen["trace"]["mean_solo_s"] > 0
    trace = Trace.load(saved)
    assert trace.header.resident.num_nodes == 300
    assert {item.num_nodes for item in trace.items} <= set(range(1, 21))
    code, again = load(typed, "--trace", saved, *sender)
    assert (code, again["by_status"]) == (0, {"OK": 30})
    assert again["trace"] == seen["trace"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--graph", "academic"), "--node-type is missing; it has nodes of author, paper, venue"),
        (("--graph", "academic", "--node-type", "book"), "node type 'book'; it has nodes of auth"),
        (("--graph", "acadmic"), "acadmic"),
        ((*TYPED, "--fanouts", "4,x"), "fanouts"),
        (("--workload", "hgt", *TYPED, "--node-type", "author"), "hgt"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_sent(typed, options, told):
    code, error = load(typed, "--rate", 10, "--requests", 3, *options)
    assert code in (1, 2)
    assert told in error


def test_nodes_of_a_graph_with_one_type_are_asked_about(server):
    code, seen = load(server, "--graph", "community", "--ids", 5, "--rate", 50, "--requests", 20)
    assert (code, seen["by_status"]) == (0, {"OK": 20})
    assert len(seen["by_model"]) > 1
    code, error = load(server, "--graph", "community", "--node-type", "a", "--rate", 5,
                       "--requests", 2)  # fmt: skip
    assert code == 2
    assert "it has one type of nodes" in error


def test_locust_asks_about_nodes_too(typed):
    ended = run(
        *("-m", "locust", "-f", "loadgen/locustfile.py", "--headless", "--host", typed.target),
        *(*TYPED, "--rate", 50, "--requests", 15, "--duration", 0, "--timeout", PATIENCE_S),
    )
    assert ended.returncode == 0, ended.stderr
    assert "15 of 15 requests" in ended.stderr
