"""Measure what a start of a server takes whose models are calibrated: time, processor time, memory.

    python -m bench.host.warm_start [QUESTION] [--quick] [--repeats N]

A server starts as a user starts it. QUESTION is

- four: it has the four demo models. Time counts until it prints `ready`, and until it has answered
  a first request. Processor time is that of all its processes until then, also of those that have
  ended; memory is their proportional set size, which counts shared pages once. Asked: 5 s, 5 s of
  processor time, 500 MiB.
- slow: it has nine such models and a new one whose code takes a minute to import. Time counts until
  each of the nine has answered. Asked: 5 s.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.kit.processes import descendants, shared_out_bytes
from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from bench.kit.waiting import wait_for
from serve.client import Client
from serve.client.errors import Unavailable
from serve.models.writer import write_model

MODELS = ("gcn", "sage", "gin", "gat")
_FEATURES = 32
#: Models of the question `slow` that are calibrated.
_OTHERS = 9
_SLOW_CODE = """
import time

import torch

time.sleep({seconds})


class Score(torch.nn.Linear):
    def forward(self, x, edge_index):
        return super().forward(x)
"""
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_TABLE = Table("A start", "measures", {
    "measure": "{measure}", "median": "{median:.2f}", "most": "{most:.2f}", "asked": "{asked:g}",
})  # fmt: skip
SCRIPTS = {
    "four": Script("warm_start", full={"repeats": 7}, quick={"repeats": 1}, tables=[_TABLE]),
    "slow": Script(
        "slow_start",
        full={"repeats": 3, "seconds": 60.0},
        quick={"repeats": 1, "seconds": 3.0},
        tables=[_TABLE],
    ),
}


def processor_s(pid: int) -> float:
    """Return the processor time of a process, those below it, and those of them that ended."""
    ticks = 0
    for one in (pid, *descendants(pid)):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            stat = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            # User and system time, and those of children that were waited for.
            ticks += sum(map(int, stat[11:15]))
    return ticks / _TICKS_A_SECOND


def started(server: ServerProcess) -> dict[str, float]:
    """Start a server and stop it; return what each measure found."""
    begun = time.monotonic()
    with server.starting():
        server.wait_ready()
        ready_s, used_s = time.monotonic() - begun, processor_s(server.pid)
        with Client(server.target) as client:
            x = np.zeros((3, _FEATURES), np.float32)
            client.infer(MODELS[0], x=x, edge_index=np.array([[0, 1], [1, 2]]))
            answered_s = time.monotonic() - begun
        memory = sum(map(shared_out_bytes, (server.pid, *descendants(server.pid))))
    return {
        "ready, s": ready_s,
        "first answer, s": answered_s,
        "processor time until ready, s": used_s,
        "memory, MiB": memory / 2**20,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each measure."""
    asked = {
        "ready, s": 5.0,
        "first answer, s": 5.0,
        "processor time until ready, s": 5.0,
        "memory, MiB": 500.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder), sections={"models": {"load": list(MODELS)}})
        with server:
            pass  # calibrates what is not, and has the files read
        found = [started(server) for _ in range(options.repeats)]
    return {"models": list(MODELS), "measures": rows_of(found, asked)}


def rows_of(found: list[dict[str, float]], asked: dict[str, float]) -> list[dict[str, Any]]:
    """Return a row for each measure, with its median, its most and what is asked."""
    return [
        {
            "measure": name,
            "median": median(one[name] for one in found),
            "most": max(one[name] for one in found),
            "asked": aim,
        }
        for name, aim in asked.items()
    ]


def answers(client: Client, model: str) -> bool:
    """Return True when the model answers."""
    x = np.zeros((3, _FEATURES), np.float32)
    try:
        client.infer(model, x=x, edge_index=np.array([[0, 1], [1, 2]]))
    except Unavailable:
        return False
    return True


def measure_slow(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for the time until the calibrated models answered."""
    found, beside = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder, root = Path(temporary), Path(temporary) / "models"
        others = [f"gcn{number}" for number in range(_OTHERS)]
        for name in others:
            shutil.copytree(ROOT / "configs" / "models" / "gcn", root / name)
        with ServerProcess(folder, repository=root):
            pass  # calibrates them
        torch.manual_seed(0)
        sizes = {"in_features": _FEATURES, "out_features": 1}
        module = torch.nn.Linear(_FEATURES, 1)
        model = write_model(root, "slow", module, factory="./model.py:Score", args=sizes)
        (model / "model.py").write_text(_SLOW_CODE.format(seconds=options.seconds))
        for _ in range(options.repeats):
            server = ServerProcess(folder, repository=root)
            begun = time.monotonic()
            with server.starting(), Client(server.target) as client:
                for name in others:
                    wait_for(partial(answers, client, name), f"an answer of {name}")
                found.append({"nine models answer, s": time.monotonic() - begun})
                beside += not answers(client, "slow")
    asked = {"nine models answer, s": 5.0}
    measures = rows_of(found, asked)
    # Starts in which the slow model was still loading when the others answered.
    return {"seconds": options.seconds, "starts_beside_it": beside, "measures": measures}


QUESTIONS = {"four": measure, "slow": measure_slow}

if __name__ == "__main__":
    question = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in QUESTIONS else "four"
    SCRIPTS[question].main(QUESTIONS[question], __doc__)
