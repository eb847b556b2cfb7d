"""Measure how soon a lane is free after its run was cancelled, executing or suspended.

    python -m bench.live.stopping [--quick] [--repeats 40]

A server's engine in this process, one lane, the four models of configs/dev.toml. A request is
launched and cancelled at a random moment of its run. The time counts from the command to stop until
the scheduler hears that the lane stopped, when the memory is free again. `run_ms` is how long such
a run takes when it is left alone.
"""

import argparse
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from bench.kit.measure import percentiles
from bench.kit.script import Script, Table
from serve.commands.configured import calibration_cache, device_of
from serve.config import load_config
from serve.core.commands import Command, LaunchTask, StopTask
from serve.core.events import Event, TaskFailed, TaskFinished
from serve.core.types import Nanos
from serve.errors import ServeError
from serve.resources import configs_path
from serve.server import clock
from serve.server.api import InferCall, Tensor
from serve.server.engine import Engine
from serve.workload import MODELS

FEATURES, EDGES_PER_NODE = 32, 10
SCRIPT = Script(
    "stopping",
    full={"repeats": 40, "models": MODELS, "nodes": (1_000, 8_000, 30_000)},
    quick={"repeats": 2, "models": MODELS[:1], "nodes": (1_000,)},
    tables=[
        Table("From the cancel until the lane is free", "rows", {
            "model": "{model}", "nodes": "{nodes:,}", "suspended": "{suspended}",
            "run, ms": "{run_ms:.1f}", "stopped": "{stopped}", "p50, µs": "{p50_us:.0f}",
            "p99, µs": "{p99_us:.0f}",
        })
    ],
)  # fmt: skip


class Watched:
    """Records when the scheduler launches, tells a lane to stop, and hears of the end."""

    def __init__(self, engine: Engine) -> None:
        scheduler = engine.driver.scheduler
        self._handle = scheduler.handle
        scheduler.handle = self.handle  # type: ignore[method-assign]
        self.launched, self.ended = threading.Event(), threading.Event()
        self.stop_ns = self.end_ns = 0
        self.stopped = False

    def handle(self, event: Event, now_ns: Nanos) -> list[Command]:
        """Return the scheduler's commands."""
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
        """Forget the run before."""
        self.launched.clear()
        self.ended.clear()
        self.stop_ns = self.end_ns = 0


@contextmanager
def one_lane() -> Iterator[Engine]:
    """Yield a started engine with a single lane."""
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


def request(model: str, num_nodes: int) -> Callable[[], InferCall]:
    """Return what makes requests for a random graph."""
    rng = np.random.default_rng(num_nodes)
    x = rng.standard_normal((num_nodes, FEATURES), dtype=np.float32)
    edges = rng.integers(0, num_nodes, (2, EDGES_PER_NODE * num_nodes))
    tensors = {
        "x": Tensor("FP32", x.shape, x.tobytes()),
        "edge_index": Tensor("INT64", edges.shape, edges.tobytes()),
    }
    return lambda: InferCall(model, "", tensors, arrived_ns=time.monotonic_ns())


def cancelled(
    engine: Engine, watched: Watched, call: InferCall, after_s: float, suspended: bool
) -> float | None:
    """Cancel a run that long after its launch; return µs until its lane was free.

    Returns None when the run had ended before.
    """
    watched.reset()
    ticket = engine.submit(call)
    waiter = threading.Thread(target=_swallow, args=(ticket.result,))
    waiter.start()
    watched.launched.wait()
    time.sleep(after_s)
    if suspended:
        engine.pool.suspend(engine.pool.lane_ids[0])
        time.sleep(0.002)
    ticket.cancel()
    waiter.join()
    if watched.stop_ns:
        watched.ended.wait()
        return (watched.end_ns - watched.stop_ns) / 1e3 if watched.stopped else None
    if suspended:  # it had ended just before, and waits to be woken
        engine.pool.ended(engine.pool.lane_ids[0])
    return None


def _swallow(result: Callable[[], object]) -> None:
    with suppress(ServeError):
        result()


def row(
    engine: Engine, watched: Watched, model: str, nodes: int, suspended: bool, repeats: int
) -> dict[str, Any]:
    """Return the figures of one model and size."""
    make = request(model, nodes)
    run_ns = sorted(engine.submit(make()).result().record.run_ns for _ in range(5))[2]
    rng, taken_us = random.Random(repeats), list[float]()
    for _ in range(repeats * 4):
        after_s = rng.random() * 0.8 * run_ns / 1e9
        found = cancelled(engine, watched, make(), after_s, suspended)
        taken_us += [found] if found is not None else []
        if len(taken_us) == repeats:
            break
    told = percentiles(taken_us or [0.0], (50, 99))
    return {
        "model": model,
        "nodes": nodes,
        "edges": EDGES_PER_NODE * nodes,
        "suspended": suspended,
        "run_ms": round(run_ns / 1e6, 3),
        "stopped": len(taken_us),
        "p50_us": told["p50"],
        "p99_us": told["p99"],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each model, size and state."""
    with one_lane() as engine:
        watched = Watched(engine)
        cases = itertools.product(options.models, options.nodes, (False, True))
        rows = [row(engine, watched, *case, options.repeats) for case in cases]
    return {"repeats": options.repeats, "rows": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
