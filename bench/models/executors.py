"""Measure forward passes by the server's executors against stock PyG, as a user would run each.

    python -m bench.models.executors [--quick] [--models gcn,sage,gin,gat] [--rounds 15]
        [--against CHECKOUT]

Three processes hold the same models (`serve.models.zoo`, 3 × 64 and 8 × 256, 100 features, 12
classes) and graphs (random, 10 edges a node), on one thread each: `stock` is plain PyG with the
environment as it is; `csr` and `csr_compiled` have a lane's allocator settings and the executor.
They are asked in turns, and the wall time of each forward pass counts. A ratio is stock ÷ executor
of one round; the median is given with the lowest and highest. Peak memory is that of torch's
allocator, traced.

`--models` may also name those of `bench.kit.architectures`, which run at 3 × 64. A model without a
layer that `csr` knows runs PyG's own code with a lane's allocator, and `compiled` in place of
`csr_compiled`.

With `--against`, a fourth process runs `csr` of another checkout, by the `.venv` there: `before`.
Its times ÷ those of this one are `against`.
"""

import argparse
import os
import statistics
import subprocess
import sys
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.kit.measure import in_turns, ratios, spread
from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from bench.models import forward_process
from bench.models.forward_process import DEGREE, SHAPES

ZOO = ("gcn", "sage", "gin", "gat")
#: The processes; the first is what the others are compared with.
KINDS = ("stock", "csr", "csr_compiled")
BEFORE = "before"
#: No round of one graph begins after this time.
LONGEST_S = 6.0
SCRIPT = Script(
    "executors",
    full={
        "models": ZOO, "rounds": 15, "nodes": (100, 300, 1_000, 3_000, 8_000, 20_000),
        "shapes": tuple(SHAPES), "against": None,
    },
    quick={"models": ZOO[:1], "rounds": 3, "nodes": (100,), "shapes": tuple(SHAPES)[:1]},
    tables=[
        Table("Forward pass, one thread", "rows", {
            "model": "{model} {shape}", "nodes": "{nodes:,}", "stock, ms": "{stock[ms]:.2f}",
            "csr, ms": "{csr[ms]:.3f}", "csr_compiled, ms": "{csr_compiled[ms]:.3f}",
            "stock ÷ csr": "{csr[ratio]:.1f}", "stock ÷ csr_compiled": "{csr_compiled[ratio]:.1f}",
        })
    ],
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each model and size, and geometric means of the ratios."""
    processes = {kind: start(kind) for kind in KINDS}
    if options.against is not None:
        processes[BEFORE] = start("csr", options.against.resolve())
    asked = [(model, shape) for shape in options.shapes for model in options.models if model in ZOO]
    asked += [(model, "architecture") for model in options.models if model not in ZOO]
    rows = [
        compared(processes, (model, shape, nodes), options.rounds)
        for model, shape in asked
        for nodes in options.nodes
    ]
    for process in processes.values():
        process.send(None)
    shapes = ("all", *dict.fromkeys(row["shape"] for row in rows))
    means = {kind: {shape: means_of(rows, kind, shape) for shape in shapes} for kind in KINDS[1:]}
    found = {"threads": 1, "ratios": means, "rows": rows}
    if options.against is not None:
        middles = [row["against"][0] for row in rows]
        found["against"] = {
            "geometric_mean": round(statistics.geometric_mean(middles), 3),
            "lowest": min(middles),
            "highest": max(middles),
        }
        print("csr of the other checkout ÷ csr of this one:", found["against"])
    return found


def means_of(rows: list[dict[str, Any]], kind: str, shape: str) -> dict[str, float]:
    """Return the geometric mean and the lowest ratio of the executor."""
    found = [row[kind]["ratio"] for row in rows if shape in ("all", row["shape"])]
    mean = statistics.geometric_mean(found)
    return {"geometric_mean": round(mean, 2), "lowest": min(found)}


def start(kind: str, checkout: Path = ROOT) -> Connection:
    """Return the pipe of a new process, which has its environment from its first instruction."""
    from serve.server.lanes.processes import LANE_ENVIRONMENT

    own = LANE_ENVIRONMENT if kind != "stock" else {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    python = sys.executable if checkout == ROOT else str(checkout / ".venv" / "bin" / "python")
    here, there = Pipe()
    with there:
        # It ends when this process has closed its end of the pipe.
        subprocess.Popen(
            [python, "-P", forward_process.__file__, kind, str(there.fileno())],
            pass_fds=[there.fileno()],
            cwd=checkout,
            env=os.environ | own | {"PYTHONPATH": str(checkout)},
        )
    return here


def compared(
    processes: dict[str, Connection], case: tuple[str, str, int], rounds: int
) -> dict[str, Any]:
    """Return times, ratios and peaks of all kinds on one graph."""
    facts = {kind: ask(process, case) for kind, process in processes.items()}
    ways = {kind: partial(ask, process, "run") for kind, process in processes.items()}
    times = in_turns(ways, rounds, warm_up=0, limit_s=LONGEST_S)
    model, shape, nodes = case
    row: dict[str, Any] = {"model": model, "shape": shape, "nodes": nodes, "edges": DEGREE * nodes}
    for kind in KINDS:
        middle, low, high = spread(ratios(times["stock"], times[kind]), 2)
        row[kind] = facts[kind] | {
            "ms": round(statistics.median(times[kind]), 4),
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
        }
    if BEFORE in times:
        row["against"] = spread(ratios(times[BEFORE], times["csr"]), 3)
    return row


def ask(process: Connection, question: Any) -> Any:
    """Return the process's answer: facts of a model and graph to hold, or the ms of a run."""
    process.send(question)
    return process.recv()


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
