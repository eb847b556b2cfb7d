"""How soon a lane is free when the run on it is given up, executing or suspended.

    python -m bench.live.stopping [--quick] [--repeats 40] [--out bench/results/stopping.json]

A server's engine in this process, one lane, the four models of configs/dev.toml. A request is
launched and cancelled at a random moment of its run; the time goes from the cancel until the engine
has its memory back, so until the lane said that it stopped and the scheduler took note. Beside it
the run time of such a request that is left alone: what a lane would be kept for at most.
"""

import argparse
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kit.result import write_result
from serve.commands.configured import calibration_cache, device_of
from serve.config import load_config
from serve.core.commands import Command, LaunchTask, StopTask
from serve.core.events import Event, TaskFailed, TaskFinished
from serve.core.fleet.fleet import Fleet
from serve.core.scheduler import Scheduler
from serve.core.types import Nanos
from serve.errors import ServeError
from serve.resources import configs_path
from serve.server import clock
from serve.server.api import InferCall, Tensor
from serve.server.engine import Engine
from serve.sim.report import quantile
from serve.workload import MODELS

SIZES = ((1_000, 8_000), (8_000, 80_000), (30_000, 300_000))
QUICK_SIZES = SIZES[:2]
FEATURES = 32


class Watched:
    """Notes when a scheduler launches, tells to stop, and hears of the end."""

    def __init__(self, scheduler: Scheduler | Fleet) -> None:
        self._handle = scheduler.handle
        self.launched = threading.Event()
        self.ended = threading.Event()
        self.stop_ns = self.end_ns = 0
        self.stopped = False

    def handle(self, event: Event, now_ns: Nanos) -> list[Command]:
        commands = self._handle(event, now_ns)
        for command in commands:
            if isinstance(command, LaunchTask):
                self.launched.set()
            elif isinstance(command, StopTask):
                self.stop_ns = now_ns
        if isinstance(event, TaskFinished | TaskFailed):
            self.end_ns = clock.now_ns()
            self.stopped = isinstance(event, TaskFailed)
            self.ended.set()
        return commands

    def reset(self) -> None:
        self.launched.clear()
        self.ended.clear()
        self.stop_ns = self.end_ns = 0


@contextmanager
def one_lane() -> Iterator[Engine]:
    config = load_config(configs_path() / "dev.toml")
    device = device_of(config)
    device = replace(device, lane_cores=device.lane_cores[:1], parallelism=1)
    engine = Engine(config, device, lambda _: None, calibration_cache(config, device))
    try:
        engine.start()
        engine.open()
        yield engine
    finally:
        engine.stop()


def request(model: str, num_nodes: int, num_edges: int) -> Callable[[], InferCall]:
    rng = np.random.default_rng((num_nodes, num_edges))
    x = rng.standard_normal((num_nodes, FEATURES), dtype=np.float32)
    edges = rng.integers(0, num_nodes, (2, num_edges))
    tensors = {
        "x": Tensor("FP32", x.shape, x.tobytes()),
        "edge_index": Tensor("INT64", edges.shape, edges.tobytes()),
    }
    return lambda: InferCall(model, "", tensors, arrived_ns=time.monotonic_ns())


def measure(
    engine: Engine, watched: Watched, call: Callable[[], InferCall], repeats: int, suspended: bool
) -> dict[str, Any]:
    run_ns = sorted(engine.submit(call()).result().record.run_ns for _ in range(5))[2]
    rng = random.Random(repeats)
    taken_us: list[float] = []
    for _ in range(repeats * 4):
        if len(taken_us) == repeats:
            break
        watched.reset()
        ticket = engine.submit(call())
        waiter = threading.Thread(target=_swallow, args=(ticket.result,))
        waiter.start()
        watched.launched.wait()
        time.sleep(rng.random() * 0.8 * run_ns / 1e9)
        if suspended:
            engine.pool.suspend(engine.pool.lane_ids[0])
            time.sleep(0.002)
        ticket.cancel()
        waiter.join()
        if watched.stop_ns:
            watched.ended.wait()
            if watched.stopped:
                taken_us.append((watched.end_ns - watched.stop_ns) / 1000)
        elif suspended:
            # It had ended just before, and waits to be woken.
            engine.pool.ended(engine.pool.lane_ids[0])
    taken_us.sort()
    return {
        "suspended": suspended,
        "run_ms": round(run_ns / 1e6, 3),
        "stopped": len(taken_us),
        "p50_us": round(quantile(taken_us, 0.5), 1),
        "p99_us": round(quantile(taken_us, 0.99), 1),
    }


def _swallow(result: Callable[[], object]) -> None:
    with suppress(ServeError):
        result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="two sizes, 10 repeats; no file")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("bench/results/stopping.json"))
    options = parser.parse_args()
    repeats = min(options.repeats, 10) if options.quick else options.repeats
    rows: list[dict[str, Any]] = []
    with one_lane() as engine:
        watched = Watched(engine.driver.scheduler)
        engine.driver.scheduler.handle = watched.handle  # type: ignore[method-assign]
        for model in MODELS:
            for nodes, edges in QUICK_SIZES if options.quick else SIZES:
                call = request(model, nodes, edges)
                for suspended in (False, True):
                    found = measure(engine, watched, call, repeats, suspended)
                    rows.append({"model": model, "nodes": nodes, "edges": edges, **found})
    table = Table(title="From giving up a run until its lane is free")
    for column in ("model", "nodes", "suspended", "run, ms", "stopped", "p50, µs", "p99, µs"):
        table.add_column(column, justify="right" if column[0] in "nrsp" else "left")
    for row in rows:
        told = (row["suspended"], row["run_ms"], row["stopped"], row["p50_us"], row["p99_us"])
        table.add_row(row["model"], f"{row['nodes']:,}", *map(str, told))
    Console().print(table)
    if not options.quick:
        result = {"repeats": repeats, "rows": rows}
        write_result(options.out, result)


if __name__ == "__main__":
    main()
