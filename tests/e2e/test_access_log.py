"""The access log of a running server."""

import json

import numpy as np
import pytest

from bench.kit.servers import ServerProcess
from serve.client import Client
from serve.client.errors import InvalidRequest
from tests.e2e.support import random_graph


def test_a_server_logs_every_finished_request_as_its_database_has_it(tmp_path):
    path = tmp_path / "access.jsonl"
    sections = {"report": {"access_log": str(path)}, "models": {"load": ["gcn"]}}
    with ServerProcess(tmp_path, sections=sections) as server, Client(server.target) as client:
        graph = random_graph(40, 200)
        answers = [
            client.infer("gcn", **graph.tensors, request_id=f"mine-{number}") for number in range(3)
        ]
        with pytest.raises(InvalidRequest):
            client.infer("gcn", x=np.zeros((3, 1), np.float32), edge_index=graph.edge_index)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    mine = {line["uid"]: line for line in found if line.get("client_id", "").startswith("mine-")}
    assert {answer.qos.request_uid for answer in answers} == set(mine)
    for answer in answers:
        line = mine[answer.qos.request_uid]
        assert (line["model"], line["status"]) == ("gcn", "OK")
        assert (line["nodes"], line["edges"]) == (40, 200)
        assert line["run_ms"] == pytest.approx(answer.qos.run_us / 1e3, abs=0.002)
    [refused] = [line for line in found if line["status"] == "INVALID_ARGUMENT"]
    assert "x" in refused["message"]
