"""How to run several tasks at once, measured: streams, processes, merged; and who goes first.

    python -m bench.gpu.concurrency [--quick] [--dry]

- throughput of the same tasks on one stream, on 2 to 8 lanes as threads with a stream each, and as
  one merged graph;
- the number of lanes that gives the most, over all of these: what `device.lanes` should be;
- interference: run time beside k others ÷ alone for each model and size, and how far each is from
  the one table that the server learns for all (``serve.estimate.interference``);
- priority: latency of a small task beside a device full of large ones, on an ordinary and on an
  urgent stream, against alone;
- processes: the same tasks in 1, 2 and 4 of them, with MPS where it may be started and without,
  against as many lanes as threads: what would speak for lanes as processes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch

from bench.gpu.kit import Result, Rig, graph, run, spread
from serve.cuda.queues import Queue

#: In one table, beside so many others.
OTHERS = (1, 2, 3, 5, 7)
SIZES = {"small": (100, 400), "medium": (2000, 20_000), "large": (20_000, 200_000)}


class Lane:
    """A thread's queue and memory, and one model's task on it."""

    def __init__(self, rig: Rig, model: Any, inputs: dict[str, torch.Tensor]) -> None:
        self.queue: Queue = rig.queue()
        self.memory = rig.lane()
        self.model, self.inputs = model, inputs
        self.place = torch.empty(inputs["x"].shape[0], 16, pin_memory=not rig.dry)

    def task(self, urgent: bool = False) -> float:
        """Run it; its milliseconds."""
        started = time.perf_counter()
        if self.memory is not None:
            self.memory.insert(12 << 30)
        with self.queue.running(urgent=urgent), torch.inference_mode():
            placed = self.queue.upload(self.inputs)
            output = self.model(placed["x"], placed["edge_index"])
            self.queue.download(output, self.place)
            del placed, output
        if self.memory is not None:
            self.memory.clear()
        return 1e3 * (time.perf_counter() - started)


def at_once(work: list[Callable[[], None]]) -> None:
    """Every piece in a thread of its own, to the end."""
    threads = [threading.Thread(target=piece) for piece in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(110 << 30, dry=arguments.dry)
    sizes = {"small": SIZES["small"]} if arguments.quick or arguments.dry else SIZES
    names = ("gcn",) if arguments.quick else ("gcn", "gat")
    #: Throughput ÷ that of one lane; run time beside so many others ÷ alone, by model and size.
    speed_of: dict[str, list[float]] = {}
    slowdown_of: dict[int, dict[str, float]] = {others: {} for others in OTHERS}
    for name in names:
        for size, (num_nodes, num_edges) in sizes.items():
            inputs = graph(num_nodes, num_edges, 128)
            if not rig.dry:
                inputs = {key: value.pin_memory() for key, value in inputs.items()}
            model = rig.model(name, 128, 16, 256, 8)
            with result.part(f"{name} {size}"):
                lanes = [Lane(rig, model, inputs) for _ in range(8)]
                # Both streams of every lane are warm before anything counts.
                for lane in lanes:
                    for urgent in (False, True):
                        with lane.queue.running(urgent=urgent), torch.inference_mode():
                            placed = lane.queue.upload(inputs)
                            model(placed["x"], placed["edge_index"])
                            lane.queue.finish()
                            del placed
                key = f"{name} {size}"
                measure(result, rig, key, lanes, model, inputs, speed_of)
                beside(result, key, lanes, slowdown_of)
                mean = {k: round(geometric_mean(v), 3) for k, v in speed_of.items()}
                best = max(mean, key=lambda name: mean[name])
                result.put("lanes", {"gain_over_one": mean, "best": best})
    with result.part("slowdown"):
        one_table(result, slowdown_of)
    with result.part("priority"):
        priority(result, rig, arguments)
    if not rig.dry:
        with result.part("processes"):
            processes(result, rig)


def measure(
    result: Result, rig: Rig, key: str, lanes: list[Lane], model: Any,
    inputs: dict[str, torch.Tensor], speed_of: dict[str, list[float]],
) -> None:  # fmt: skip
    def batch(count: int) -> Callable[[], None]:
        def piece(lane: Lane) -> Callable[[], None]:
            def run_all() -> None:
                for _ in range(16 // count):
                    lane.task()

            return run_all

        return lambda: at_once([piece(lane) for lane in lanes[:count]])

    num_nodes = inputs["x"].shape[0]
    offsets = torch.arange(16).repeat_interleave(inputs["edge_index"].shape[1]) * num_nodes
    union = {
        "x": inputs["x"].repeat(16, 1),
        "edge_index": inputs["edge_index"].repeat(1, 16) + offsets,
    }
    variants = {f"{count} lanes": batch(count) for count in (1, 2, 4, 8)}
    if num_nodes <= 2000:
        merged = Lane(rig, model, union)

        def at_one_go() -> None:
            merged.task()

        variants["16 merged"] = at_one_go
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3):
        for name, work in variants.items():
            times[name] += [1e3 * t / 16 for t in rig.time_s(work, 1)]
    result.put(f"ms_per_task {key}", {name: spread(found) for name, found in times.items()})
    for name in variants:
        if name.endswith("lanes"):
            gain = spread(times["1 lanes"])["median"] / spread(times[name])["median"]
            speed_of.setdefault(name, []).append(gain)


def beside(
    result: Result, key: str, lanes: list[Lane], slowdown_of: dict[int, dict[str, float]]
) -> None:
    """A task's time beside the same of other lanes."""
    alone = [lanes[0].task() for _ in range(10)]
    base = spread(alone)["median"]
    table = {}
    for others in OTHERS:
        stop = threading.Event()
        found: list[float] = []

        def load(lane: Lane, stop: threading.Event = stop) -> Callable[[], None]:
            def piece() -> None:
                while not stop.is_set():
                    lane.task()

            return piece

        def watched(stop: threading.Event = stop, found: list[float] = found) -> None:
            time.sleep(0.05)
            found += [lanes[0].task() for _ in range(10)]
            stop.set()

        at_once([watched, *(load(lane) for lane in lanes[1 : others + 1])])
        table[str(others)] = spread([t / base for t in found])
        slowdown_of[others][key] = table[str(others)]["median"]
    result.put(f"slowdown_beside {key}", {"alone_ms": spread(alone), **table})


def one_table(result: Result, slowdown_of: dict[int, dict[str, float]]) -> None:
    """What one number for all models and sizes would be, and how far off it is for one of them."""
    table = {0: 1.0} | {k: geometric_mean(found.values()) for k, found in slowdown_of.items()}
    off = {
        f"{key} beside {others}": round(value / table[others] - 1, 3)
        for others, found in slowdown_of.items()
        for key, value in found.items()
    }
    result.put("slowdown", {"table": {str(k): round(v, 3) for k, v in table.items()}, "off": off})
    worst = max(off, key=lambda name: abs(off[name]))
    if len(off) > len(OTHERS):  # of several models and sizes
        result.aim(14, abs(off[worst]) <= 0.25, {worst: off[worst]})


def priority(result: Result, rig: Rig, arguments: argparse.Namespace) -> None:
    large_size = (500, 4000) if rig.dry or arguments.quick else SIZES["large"]
    large_inputs, small_inputs = graph(*large_size, 128), graph(100, 400, 128)
    if not rig.dry:
        large_inputs = {key: value.pin_memory() for key, value in large_inputs.items()}
    large, small = rig.model("gcn", 128, 16, 256, 8), rig.model("gcn", 128, 16, 64, 3)
    crowd = [Lane(rig, large, large_inputs) for _ in range(4)]
    one = Lane(rig, small, small_inputs)
    for lane in (*crowd, one):
        for urgent in (False, True):
            lane.task(urgent)
    found = {"alone": [one.task() for _ in range(50)]}
    for name, urgent in (("ordinary", False), ("urgent", True)):
        stop = threading.Event()

        def load(lane: Lane, stop: threading.Event = stop) -> Callable[[], None]:
            def piece() -> None:
                while not stop.is_set():
                    lane.task()

            return piece

        def watched(stop: threading.Event = stop, name: str = name, urgent: bool = urgent) -> None:
            time.sleep(0.05)
            found[name] = [one.task(urgent) for _ in range(20 if rig.dry else 100)]
            stop.set()

        at_once([watched, *(load(lane) for lane in crowd)])
    result.put("small_beside_large_ms", {name: spread(times) for name, times in found.items()})
    alone, ordinary, urgent_ms = (spread(times)["median"] for times in found.values())
    told = {"ordinary": round(ordinary / alone, 2), "urgent": round(urgent_ms / alone, 2)}
    result.put("small_beside_large_to_alone", told)
    result.aim(12, urgent_ms <= 2 * alone, told)
    result.put("large_alone_ms", spread([crowd[0].task() for _ in range(5)]))


_CHILD = """
import sys, time, torch
sys.path.insert(0, ".")
from bench.gpu.kit import graph
from serve.models import zoo
torch.manual_seed(0)
model = zoo.gcn(128, 16, hidden_channels=256, num_layers=8).eval().cuda()
inputs = {k: v.pin_memory() for k, v in graph(2000, 20000, 128).items()}
def task():
    with torch.inference_mode():
        x, e = (inputs[k].cuda(non_blocking=True) for k in ("x", "edge_index"))
        model(x, e).cpu()
for _ in range(10): task()
print("ready", flush=True)
sys.stdin.readline()
started = time.perf_counter()
for _ in range(200): task()
print((time.perf_counter() - started) * 1e3 / 200, flush=True)
"""


def processes(result: Result, rig: Rig) -> None:
    threads_ms = as_threads(result, rig)
    many_at_once(result, "without MPS", dict(os.environ))
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        paths = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }  # fmt: skip
        for path in paths.values():
            os.mkdir(path)
        environment = {**os.environ, **paths}
        said = control(environment, "", "-d")
        result.put("mps_start", said or "no word")
        try:
            processes_ms = many_at_once(result, "with MPS", environment)
            # Without a server, clients have run without MPS and said nothing.
            servers = control(environment, "get_server_list\n")
            result.put("mps_servers", servers or "none: MPS is off")
            if servers.strip().isdigit():
                told = {"threads_ms": threads_ms, "processes_ms": processes_ms}
                result.aim(13, threads_ms <= 1.1 * processes_ms, told)
        finally:
            control(environment, "quit\n")


def control(environment: dict[str, str], told: str, *options: str) -> str:
    """What MPS's control program answers."""
    try:
        said = subprocess.run(
            ["nvidia-cuda-mps-control", *options], input=told, capture_output=True, text=True,
            timeout=20, check=False, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"off: {error}"
    return (said.stdout + said.stderr).strip()


def as_threads(result: Result, rig: Rig) -> float:
    """Milliseconds a task on as many lanes as there are processes; the least."""
    inputs = {key: value.pin_memory() for key, value in graph(*SIZES["medium"], 128).items()}
    model = rig.model("gcn", 128, 16, 256, 8)
    lanes = [Lane(rig, model, inputs) for _ in range(4)]
    found = {}
    for count in (1, 2, 4):

        def work(lane: Lane) -> Callable[[], None]:
            def run_all() -> None:
                for _ in range(100):
                    lane.task()

            return run_all

        pieces = [work(lane) for lane in lanes[:count]]
        seconds = rig.time_s(partial(at_once, pieces), 2)
        found[f"{count} lanes"] = round(1e3 * min(seconds) / 100 / count, 3)
    result.put("threads gcn medium, ms_per_task", found)
    return min(found.values())


def many_at_once(result: Result, name: str, environment: dict[str, str]) -> float:
    """The same in processes, each with weights and context of its own."""
    found, all_ms = {}, []
    for count in (1, 2, 4):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env=environment,
            )
            for _ in range(count)
        ]  # fmt: skip
        try:
            for child in children:
                assert child.stdout is not None
                child.stdout.readline()
            for child in children:
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
            times = [float(child.communicate(timeout=60)[0]) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        all_ms.append(round(max(times) / count, 3))
        found[f"{count} processes"] = {"ms_per_task_of_one": times, "all": all_ms[-1]}
    result.put(f"processes gcn medium, {name}", found)
    return min(all_ms)


if __name__ == "__main__":
    run("concurrency", __doc__, body)
