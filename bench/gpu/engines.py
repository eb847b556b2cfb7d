"""The server's engine for benches: on the device, below gRPC, with four models on disk."""

import argparse
import functools
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bench.gpu.kit import MODELS, Result, graph, run, seeded
from bench.kit.machine import gpu_facts
from serve.config import (
    Config,
    GraphConfig,
    ModelsConfig,
    SchedulingConfig,
    ServerConfig,
)
from serve.config_device import DeviceConfig
from serve.errors import ConfigError
from serve.graphs.generate import generate_edges
from serve.ipc.setup import DevicePlace
from serve.models.cache import CalibrationCache
from serve.models.writer import write_model
from serve.obs.record import RequestRecord
from serve.server.api import InferCall, Tensor
from serve.server.device import Device, find_device
from serve.server.engine import Engine
from serve.server.gpus import find_gpus

FEATURES, CLASSES = 128, 16
Graphs = list[dict[str, torch.Tensor]]
#: A model, and the index of a graph.
Job = tuple[str, int]
#: Asked once a process, as it starts another process that imports torch and makes a context.
_gpus = functools.cache(find_gpus)


def write_seeded(
    folder: Path, key: str, name: str, features: int, classes: int, hidden: int, layers: int
) -> None:
    """Write ``seeded`` as the model `key` of the repository in `folder`."""
    args = {
        "in_channels": features, "out_channels": classes, "hidden_channels": hidden,
        "num_layers": layers,
    }  # fmt: skip
    module = seeded(name, features, classes, hidden, layers)
    write_model(folder, key, module, factory=f"serve.models.zoo:{name}", args=args)


@dataclass(frozen=True)
class Bench:
    """Models on disk and in this process, and graphs."""

    folder: Path
    dry: bool
    quick: bool

    @property
    def short(self) -> bool:
        """True when the bench measures less in less time."""
        return self.quick or self.dry

    def write(self) -> None:
        """Write four seeded models of the paper's size."""
        for name in MODELS:
            write_seeded(self.folder, name, name, *self._sizes)

    def reference(self, name: str) -> torch.nn.Module:
        """Return the same model in this process."""
        return seeded(name, *self._sizes)

    def resident_graph(
        self, name: str, nodes: int, *, binary: bool = False, **options: Any
    ) -> GraphConfig:
        """Write a graph of random features, 0 and 1 with `binary`; return its configuration."""
        rng = np.random.default_rng(0)
        edges = generate_edges(nodes, 15 * nodes, rng).astype(np.int64)
        x = rng.standard_normal((nodes, FEATURES), dtype=np.float32)
        if binary:
            x = (x > 1).astype(np.float32)
        path = self.folder / f"{name}.npz"
        np.savez(path, num_nodes=nodes, edge_index=edges, x=x)
        return GraphConfig(name="g", file=str(path), **options)

    def graphs(self, count: int, least: int = 100, most: int = 8_000) -> Graphs:
        """Return `count` graphs of log-spaced sizes, with ten edges a node."""
        sizes = np.geomspace(least, 1_000 if self.dry else most, count).astype(int)
        return [graph(int(n), 10 * int(n), FEATURES, seed=i) for i, n in enumerate(sizes)]

    @contextmanager
    def engine(
        self,
        policy: str,
        discipline: str,
        lanes: int | None = None,
        budget: str | None = None,
        *,
        merge: bool = True,
        cuda_graphs: Literal["auto", "off"] = "auto",
        graphs: tuple[GraphConfig, ...] = (),
        kernels: bool = True,
    ) -> Iterator[tuple[Engine, list[RequestRecord]]]:
        """Yield a started engine, with or without our `kernels`, and the list of its records."""
        chosen = self._chosen(lanes, budget, cuda_graphs)
        config = Config(
            server=ServerConfig(max_queue=4096, max_message="16 MiB"),
            models=ModelsConfig(
                repository=str(self.folder),
                calibration_s=0.3 if self.dry else 2.0 if self.quick else 6.0,
            ),
            device=chosen,
            scheduling=SchedulingConfig(policy=policy, discipline=discipline, merge=merge),
            graph=graphs,
        )
        device = self._device(chosen, kernels=kernels)
        if self.dry:
            count = lanes or 2
            device = replace(
                device, lane_cores=((),) * count, parallelism=count, can_suspend=False,
                places=(
                    DevicePlace(
                        "cpu", replay_bytes=int(cuda_graphs == "auto"), has_kernels=kernels
                    ),
                ),
            )  # fmt: skip
        # All parts share it: time on a GPU is short.
        kept = Path("build") / ("gpu-dry" if self.dry else "gpu") / "calibrations"
        cache = CalibrationCache(kept, device=device.name, budget_s=config.models.calibration_s)
        records: list[RequestRecord] = []
        engine = Engine(config, device, records.append, cache)
        try:
            engine.start()
            engine.open()
            # A start does not wait for all models that are yet to be calibrated.
            engine.wait_loaded()
            yield engine, records
        finally:
            engine.stop()

    def budget_for(self, tasks_bytes: int, lanes: int) -> str:
        """Return the least `device.memory_budget` that leaves that much for weights and tasks."""

        def budget_bytes(memory_bytes: int) -> int:
            try:
                return self._device(self._chosen(lanes, f"{memory_bytes} B")).budget_bytes
            except ConfigError:
                return 0

        return f"{bisect_left(range(1, 1 << 50), tasks_bytes, key=budget_bytes) + 1} B"

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return (FEATURES, CLASSES, 64, 3) if self.dry else (FEATURES, CLASSES, 256, 8)

    def _chosen(
        self, lanes: int | None, budget: str | None, cuda_graphs: Literal["auto", "off"] = "auto"
    ) -> DeviceConfig:
        return DeviceConfig(
            kind="cpu" if self.dry else "cuda", lanes=lanes, memory_budget=budget,
            cuda_graphs=cuda_graphs,
        )  # fmt: skip

    def _device(self, chosen: DeviceConfig, *, kernels: bool = True) -> Device:
        gpus = None
        if not self.dry:
            gpus = tuple(replace(gpu, has_kernels=kernels and gpu.has_kernels) for gpu in _gpus())
        return find_device(chosen, spare_lanes=False, gpus=gpus)


def call(name: str, inputs: dict[str, torch.Tensor], **options: Any) -> InferCall:
    """Return a request that refers to the tensors in place, as one that came off the wire."""
    kinds = {"x": "FP32", "edge_index": "INT64"}
    tensors = {
        key: Tensor(kinds[key], tuple(value.shape), value.numpy().data.cast("B"))
        for key, value in inputs.items()
    }
    arrived = options.pop("arrived_ns", time.monotonic_ns())
    return InferCall(name, "", tensors, arrived_ns=arrived, **options)


def nodes_call(ids: Any, seed: int, model: str = "sage") -> InferCall:
    """Return a request for nodes of the resident graph `g`; the seed decides what is sampled."""
    tensors = {"node_ids": Tensor("INT64", ids.shape, ids.tobytes())}
    return InferCall(
        model, "", tensors, arrived_ns=time.monotonic_ns(), graph="g", seed=seed,
        fanouts=(10, 10, 5),
    )  # fmt: skip


def submit(engine: Engine, graphs: Graphs, job: Job, **options: Any) -> Any:
    """Return the server's answer to a job."""
    return engine.submit(call(job[0], graphs[job[1]], **options)).result()


def pmc_errors(records: Iterable[RequestRecord]) -> list[float]:
    """Return estimate ÷ measured − 1 of the peak memory of each run that has a measured one."""
    return [
        r.pmc_estimate_bytes / r.pmc_measured_bytes - 1 for r in records if r.pmc_measured_bytes
    ]


def memory_used_mib() -> int | None:
    """Return the device memory in use by the driver's account; None where it tells nothing."""
    said = gpu_facts("memory.used", units=False)
    return int(said[0]) if said and said[0].isdigit() else None


def watch(engine: Engine) -> list[float]:
    """Return a list that gets the processor seconds of every call of the scheduler from now on."""
    spent: list[float] = []
    scheduler: Any = engine.driver.scheduler
    inner = scheduler.handle

    def handle(event: Any, now_ns: Any) -> Any:
        started = time.thread_time()
        try:
            return inner(event, now_ns)
        finally:
            spent.append(time.thread_time() - started)

    scheduler.handle = handle
    return spent


def run_on_engine(name: str, about: str | None, body: Callable[[Result, Bench], None]) -> None:
    """Run a script that needs the models on disk: arguments, result, exit code."""

    def with_models(result: Result, arguments: argparse.Namespace) -> None:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), arguments.dry, arguments.quick)
            bench.write()
            body(result, bench)

    run(name, about, with_models)
