"""A model that leaks: its lanes are started anew before they outgrow the budget."""

import re
import shutil

import numpy as np
import torch

from bench.kit.servers import ServerProcess
from serve.models.writer import write_model
from tests.e2e import leaky
from tests.e2e.support import Graph, infer, raw_channel
from tests.processes import http_get, metric, wait_for

LANES = 2
BUDGET_BYTES = 512 << 20
CALLS = 100
RUN_BYTES = 16_000_000
#: What a lane of this server may hold: the memory it may keep, and the least that lanes may leak.
LIMIT_BYTES = (32 + 128) << 20
#: What it holds at most when it is restarted. While another lane starts, which takes long on a
#: busy machine, it waits until it holds twice its limit. It tells what it holds in steps of 16 MiB,
#: after its answer, so that two more runs may begin before it is heard.
MOST_BYTES = 2 * LIMIT_BYTES + (16 << 20) + 2 * RUN_BYTES


def memory_bytes(server):
    """Private memory of every lane that is up."""
    _, text = http_get(server, "/metrics")
    found = re.findall(r'^gnnserve_lane_memory_bytes\{lane="\d+"\} (\S+)$', text, re.MULTILINE)
    return [float(size) for size in found]


def test_lanes_that_grow_are_started_anew_and_no_request_is_lost(tmp_path):
    torch.manual_seed(0)
    root = tmp_path / "models"
    folder = write_model(root, "leaky", leaky.build(), factory="./model.py:build", args={})
    shutil.copy(leaky.__file__, folder / "model.py")
    sections = {"device": {"memory_budget": "512 MiB", "lanes": LANES}}
    graph = Graph(np.ones((3, 4), np.float32), np.zeros((2, 0), np.int64))
    with (
        ServerProcess(tmp_path, repository=root, sections=sections) as server,
        raw_channel(server) as call,
    ):
        wait_for(lambda: len(memory_bytes(server)) == LANES, "the size of all lanes")
        before_bytes = sum(memory_bytes(server))
        most_bytes = 0.0
        for _ in range(CALLS):
            assert infer(call, "leaky", graph).outputs["output"].shape == (3, 2)
            most_bytes = max(most_bytes, sum(memory_bytes(server)))
        recycled = metric(server, r'gnnserve_lanes_recycled_total\{reason="memory"\}')
        # Whatever runs left behind went with lanes that were restarted, or is still held.
        assert recycled * MOST_BYTES >= CALLS * RUN_BYTES - LANES * MOST_BYTES > 0
        assert most_bytes - before_bytes < BUDGET_BYTES
        wait_for(lambda: metric(server, "gnnserve_lanes_up") == LANES, "all lanes")
        log = server.log.read_text()
    held_mib = re.findall(r"lane \d is restarted: it holds (\d+) MiB between runs", log)
    assert len(held_mib) >= recycled
    assert min(map(int, held_mib)) >= LIMIT_BYTES >> 20
    assert "the last was of model leaky:1" in log
