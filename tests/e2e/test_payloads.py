"""Payloads that a server recorded, sent again to another, which gets exactly them."""

import stat
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from bench.kit.servers import ROOT, ServerProcess
from bench.kit.waiting import PATIENCE_S
from serve.client import Client, Request
from serve.payloads import Payloads, beside
from serve.recording import TrafficRecording
from tests.e2e.support import random_graph

GRAPHS = ({"name": "community", "dataset": "community"},)

pytestmark = pytest.mark.timeout(600)


def server(folder, **report):
    report = {"record": "requests.jsonl", "record_payloads": True, **report}
    sections = {"report": report, "models": {"load": ["gcn", "sage"]}}
    return ServerProcess(folder, sections=sections, graphs=GRAPHS)


def sent(folder):
    """Return the requests of a recording: what was asked, with the bytes of all tensors."""
    path = folder / "requests.jsonl"
    payloads = Payloads.open(beside(path))
    recording = TrafficRecording.decode(path.read_bytes())
    found = []
    for one in recording.requests:
        request = payloads.request(one.uid)
        tensors = [
            (tensor.name, tensor.datatype, tensor.shape, bytes(raw))
            for tensor, raw in zip(request.inputs, request.raws, strict=True)
        ]
        assert request.model == one.model
        found.append((one.model, one.graph, one.seed, one.fanouts, one.tenant, *tensors))
    return found


def test_another_server_gets_exactly_what_was_recorded(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    with server(first) as recorded, Client(recorded.target) as client:
        graphs = [random_graph(20 + number, 77, seed=number) for number in range(5)]
        for graph in graphs:
            client.infer("gcn", **graph.tensors, tenant="a")
        # Twice the same, and once for two models together.
        client.infer("gcn", **graphs[0].tensors)
        client.infer(["gcn", "sage"], **graphs[1].tensors)
        client.infer("gcn", graph="community", node_ids=[7, 5, 7, 1999], fanouts=[4, 2], seed=11)
        list(client.infer_stream(Request(model="sage", **graph.tensors) for graph in graphs))
    requests = sent(first)
    assert len(requests) == 5 + 1 + 2 + 1 + 5
    x = np.ascontiguousarray(graphs[3].tensors["x"], np.float32)
    assert any(("x", "FP32", x.shape, x.tobytes()) in one for one in requests)
    (by_ids,) = (one for one in requests if one[1])
    assert by_ids[1:4] == ("community", 11, "4,2")
    assert by_ids[5] == ("node_ids", "INT64", (4,), np.array([7, 5, 7, 1999]).tobytes())

    file = beside(first / "requests.jsonl")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with server(second) as again:
        done = subprocess.run(
            [sys.executable, "-m", "loadgen", "--target", again.target, "--json", "--timeout",
             str(PATIENCE_S), "--replay", str(first / "requests.jsonl"), "--workers", "2"],
            cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert Counter(sent(second)) == Counter(requests)
