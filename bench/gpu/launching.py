"""Measure what launching takes of the host: our operators, one of torch's, and a whole run.

    python -m bench.gpu.launching [--quick] [--dry]

It is the processor time of the thread that launches, which waits for the device between rounds. The
run is a GCN of 8 × 256 on `csr`, whose operators are also told together. A task is what a lane does
for a request: copies up, the run, the copy back and the wait for it; the kernels are launched or
replayed. A packet is a request from the server's packet to the answer, in a lane as the server has
it: launched, replayed by Python, and replayed by the loop that needs none. With `--dry` launches do
nothing: a library of empty functions, which `cc` compiles, stands in for CUDA's. Needs the
extension, msgspec and safetensors.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.kit import MODELS, Result, Rig, graph, run, spread
from bench.gpu.served_lane import LIMIT_BYTES, ServedLane, table_of, written
from bench.kit.architectures import wrap
from serve.graphs.features import FeatureKeeper
from serve.ipc.messages import GatherRef, Part, RunTask
from serve.lane.cuda.buckets import bucket
from serve.lane.cuda.capturing import Recorder
from serve.lane.cuda.graph_kernels import OPERATORS, graph_kernels, simulated_kernels
from serve.lane.executors import with_executor
from serve.lane.models.loader import LoadedModel
from serve.lane.models.sizing import SHORT
from serve.server.staging import aligned

WIDTH, LAYERS, HEADS = 256, 8, 4
NODES, EDGES = 100, 1_000
#: Of the resident graph.
ROWS = 1_000
CALLS, ROUNDS = 50, 40


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(8 << 30, dry=arguments.dry)
    rig.use_kernels()
    rounds = 5 if arguments.quick or arguments.dry else ROUNDS
    operators = idle_kernels() if rig.dry else graph_kernels()
    inputs = {key: value.to(rig.device) for key, value in graph(NODES, EDGES, WIDTH).items()}
    loaded, _ = wrap(MODELS["gcn"](WIDTH, WIDTH, hidden_channels=WIDTH, num_layers=LAYERS),
                     "gcn", ("x", "edge_index"), WIDTH)  # fmt: skip
    loaded.module.to(rig.device)
    csr = with_executor(loaded, "csr")
    rig.synchronize()
    ways = calls(operators, inputs) | {"torch's relu": partial(torch.relu, inputs["x"])}
    if not rig.dry:  # there the processor would compute it
        ways["the whole run"] = partial(csr.run, inputs)
    with torch.inference_mode():
        found = {name: host_us(rig, work, rounds) for name, work in ways.items()}
        if not rig.dry:
            found |= rig.lanes(1)[0].call(of_tasks, rig, csr, rounds)
    found |= of_packets(rig, rounds)
    result.put("host_us", {name: spread(times, 2) for name, times in found.items()})


def of_tasks(rig: Rig, model: LoadedModel, rounds: int) -> dict[str, list[float]]:
    """Return ``host_us`` of a lane's task, launched and replayed; in the lane's thread."""
    lane = rig.lanes(1)[0]
    inputs = lane.queue.stage(graph(NODES, EDGES, WIDTH))
    recorder = Recorder(lane.queue, None)
    shapes = [("x", "float32", (NODES, WIDTH)), ("edge_index", "int64", (2, EDGES))]
    captured = recorder.capture(model, bucket(SHORT, shapes, {"N": NODES, "E": EDGES}))
    answer = lane.queue.landing(torch.empty(NODES, WIDTH))

    def launched() -> None:
        with lane.queue.running():
            lane.queue.download([(model.run(lane.queue.upload(inputs)), answer)])

    replayed = partial(recorder.replay, captured, inputs, [(NODES, WIDTH)])
    ways: dict[str, Callable[[], object]] = {
        "a task, launched": launched, "a task, replayed": replayed,
    }  # fmt: skip
    with torch.inference_mode():
        return {name: host_us(rig, work, rounds) for name, work in ways.items()}


def of_packets(rig: Rig, rounds: int) -> dict[str, list[float]]:
    """Return microseconds of a lane's thread for each packet, the ways taking turns.

    A sample's features are rows of a resident graph.
    """
    inputs, asked = graph(NODES, EDGES, WIDTH), 2 if rig.dry else CALLS
    ways = {
        "a packet, launched": (False, True, False),
        "a packet, replayed by Python": (True, True, False),
        "a packet, replayed": (True, False, False),
        "a sample, replayed by Python": (True, True, True),
        "a sample, replayed": (True, False, True),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as until_end:
        models = {"m": written(Path(folder), "gcn", WIDTH, WIDTH, WIDTH, LAYERS)}
        keeper = FeatureKeeper(dtype="uint8", folder=Path(folder), shared=True)
        features = keeper.kept(np.ones((ROWS, WIDTH), np.float32), "bench")
        lanes = {
            name: until_end.enter_context(
                ServedLane(rig, models, replay_most=replays << 20, by_python=by_python)
            )
            for name, (replays, by_python, _) in ways.items()
        }
        tasks = {
            name: _task(lanes[name], inputs, features if sampled else None)
            for name, (_, _, sampled) in ways.items()
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, lane in lanes.items():
                started_ns = lane.cpu_ns()
                for _ in range(asked):
                    lane.ask(tasks[name])
                if number:  # the first one captures
                    found[name].append((lane.cpu_ns() - started_ns) / asked / 1e3)
    return found


def _task(
    lane: ServedLane,
    inputs: Mapping[str, torch.Tensor],
    features: "np.ndarray[Any, Any] | None",
) -> RunTask:
    """Put the request into the lane's pool, with `features` as a sample of that resident graph."""
    places = {"edge_index": inputs["edge_index"].numpy()}
    if features is None:
        places["x"] = inputs["x"].numpy()
    else:
        places |= {
            "ids": np.arange(NODES), "at": np.empty(0, np.int64),
            "new": np.empty((0, WIDTH), np.float32),
        }  # fmt: skip
    refs, end = {}, 0
    for name, value in places.items():
        refs[name] = lane.put(name, value, end)
        end += aligned(value.nbytes)
    gather = None
    if features is not None:
        table = table_of(features)
        lane.map(table)
        gather = GatherRef(table, refs["ids"], refs["at"], refs["new"])
    given = tuple(refs[name] for name in ("x", "edge_index") if name in refs)
    return RunTask(1, "m", (Part(given, end, 4 * NODES * WIDTH, gather),), LIMIT_BYTES)


def idle_kernels() -> dict[str, Any]:
    """Return operators whose launches do nothing."""
    functions = "".join(f"int gnnserve_graph_{name}(void) {{ return 0; }}\n" for name in OPERATORS)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "idle.c", Path(folder) / "libidle.so"
        source.write_text(functions + "long gnnserve_graph_csr_scratch(long e) { return e; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
        return simulated_kernels(str(library))


def calls(
    operators: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
) -> dict[str, Callable[[], object]]:
    """Return a call of each operator, and all those of a run."""
    x, edges = inputs["x"], inputs["edge_index"]
    bias, att = x[0].clone(), x[1].clone()
    sort = partial(operators["csr"], edges, NODES, True, False)
    made = sort()
    normalise = partial(operators["normalise"], made, NODES, False, None)
    weight = normalise()
    aggregate = partial(operators["aggregate"], made, x, weight, 0, None, 1.0, bias, True)
    scores = operators["head_dots"](x, att, HEADS)

    def of_a_run() -> None:
        sort()
        normalise()
        for _ in range(LAYERS):
            aggregate()

    return {
        "csr": sort,
        "normalise": normalise,
        "aggregate": aggregate,
        "head_dots": partial(operators["head_dots"], x, att, HEADS),
        "attend": partial(
            operators["attend"], made, False, True, 0, scores, scores, x, HEADS, 0.2, False,
            None, None, None, bias,
        ),
        "all operators of a run": of_a_run,
    }  # fmt: skip


def host_us(rig: Rig, work: Callable[[], object], rounds: int) -> list[float]:
    """Return microseconds of this thread for a call, one number a round."""
    found = []
    for number in range(rounds + 1):
        started_ns = time.thread_time_ns()
        for _ in range(CALLS):
            work()
        took_ns = time.thread_time_ns() - started_ns
        rig.synchronize()
        if number:  # the first one is a warm-up
            found.append(took_ns / CALLS / 1e3)
    return found


if __name__ == "__main__":
    run("launching", __doc__, body)
