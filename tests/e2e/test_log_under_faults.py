"""Each line of a server's log parses, whatever models print and whatever is killed meanwhile.

`LOG_LINES=100000` makes it long.
"""

import json
import os
import random
import shutil
import signal
import threading
from contextlib import ExitStack, suppress

import grpc
import numpy as np
import pytest
import torch

from bench.kit.servers import ServerProcess
from serve.models.writer import write_model
from tests.e2e import printing
from tests.e2e.support import REPOSITORY, Graph, infer, raw_channel
from tests.processes import PATIENCE_S, descendants, wait_for

LINES = int(os.environ.get("LOG_LINES", 2000))
LANES, CALLERS, MODELS = 4, 4, 8
#: Lines of the log from one kill to the next: where all is slow, killing by time leaves no lane
#: that prints.
LINES_A_KILL = 400
#: Deeds that end by themselves, those that print most more often.
DEEDS = [
    printing.print_a_line, printing.print_an_error, printing.print_progress, printing.warn,
    printing.log, printing.write_from_c, printing.print_a_long_line, printing.write_no_text,
    *[printing.print_some_lines, printing.write_no_text] * 4,
]  # fmt: skip


@pytest.fixture
def server(tmp_path):
    root = tmp_path / "models"
    shutil.copytree(REPOSITORY / "gcn", root / "gcn")
    # Several, as those whose lanes are killed pause; alike, so that one calibration serves all.
    for number in range(MODELS):
        torch.manual_seed(0)
        args = {"in_channels": 4, "out_channels": 2}
        made = printing.build(**args)
        folder = write_model(root, f"talks{number}", made, factory="./model.py:build", args=args)
        shutil.copy(printing.__file__, folder / "model.py")
    sections = {"device": {"lanes": LANES, "memory_budget": "1 GiB"}, "log": {"level": "DEBUG"}}
    with ServerProcess(tmp_path, repository=root, sections=sections) as found:
        yield found


def talk(server, over, seed):
    """Have models print, until `over`; requests whose lane is killed may fail."""
    choose = random.Random(seed)
    with raw_channel(server) as call:
        while not over.is_set():
            x = np.zeros((3, 4), np.float32)
            x[0, 0] = printing.FIRST + printing.DEEDS.index(choose.choice(DEEDS))
            with suppress(grpc.RpcError):
                model = f"talks{choose.randrange(MODELS)}"
                infer(call, model, Graph(x, np.zeros((2, 0), np.int64)))


def kill_one(server, choose):
    """Kill a lane or the gateway."""
    found = descendants(server.pid)
    gateways = [pid for pid, command in found.items() if "serve.rest.run" in command]
    lanes = [pid for pid, command in found.items() if "forkserver" in command]
    victims = gateways if choose.random() < 0.1 else lanes
    if victims:
        with suppress(ProcessLookupError):
            os.kill(choose.choice(victims), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900 + LINES // 20)
def test_every_line_parses_while_processes_are_killed(server):
    over, choose = threading.Event(), random.Random(0)
    with ExitStack() as stack:
        callers = [
            threading.Thread(target=talk, args=(server, over, seed)) for seed in range(CALLERS)
        ]
        for caller in callers:
            stack.callback(caller.join, PATIENCE_S)
            caller.start()
        stack.callback(over.set)
        killed_at = 0

        def enough():
            nonlocal killed_at
            with server.log.open("rb") as log:
                lines = sum(1 for _ in log)
            if lines - killed_at > LINES_A_KILL:
                kill_one(server, choose)
                killed_at = lines
            return lines >= LINES

        wait_for(enough, f"{LINES} lines", PATIENCE_S + LINES / 20)
    wait_for(lambda: server.stop() == 0, "its end")
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert len(lines) >= LINES
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {"output", "py.warnings", "my.model"} <= {line["logger"] for line in lines}
    assert any("restart" in line["message"] or "ended" in line["message"] for line in lines)
    assert server.stdout_lines == ("ready\n",)
