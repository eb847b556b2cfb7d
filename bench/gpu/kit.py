"""The kit of GPU benches: the device with our arena, models, graphs, and a result file.

It needs torch, torch-geometric and numpy only. With `--dry` everything runs on the processor, which
shows that a script works; the numbers mean nothing then, and the result says so.
"""

import argparse
import faulthandler
import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.gpu.aims import aim_row
from bench.gpu.lanes import Lane, first_products
from bench.kit.machine import gpu_facts, machine_facts
from serve.graphs.generate import generate_edges
from serve.lane.cuda.arena import DeviceArena, LaneMemory
from serve.lane.cuda.cuda_queue import Copies, CudaQueue, Pinned
from serve.lane.cuda.partition import Partition
from serve.lane.cuda.queues import HostQueue, Queue
from serve.models import zoo
from serve.native_cuda import CudaLibrary

RESULTS = Path("build") / "gpu" / "results"
DRY_RESULTS = Path("build") / "gpu-dry" / "results"
_GPU = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
#: A GPU that is hot or throttled gives other numbers.
_CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,pstate"
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": zoo.gcn, "sage": zoo.sage, "gin": zoo.gin, "gat": zoo.gat,
}  # fmt: skip
_cuda: Any = torch.cuda


class Result:
    """One bench's JSON, written after every entry so that a run cut short keeps what it found."""

    def __init__(self, name: str, dry: bool, out: Path | None) -> None:
        self._path = out or RESULTS / f"{name}.json"
        machine = machine_facts() | {"gpu": gpu_facts(_GPU), "cuda_of_torch": torch.version.cuda}
        self._content: dict[str, Any] = {"machine": machine, "dry": dry, "checks": []}
        self._content["clocks"] = {"start": gpu_facts(_CLOCKS)}
        self._started = time.monotonic()

    def put(self, key: str, value: Any) -> None:
        """Store and print one finding."""
        self._content[key] = value
        print(f"{key}: {json.dumps(value)[:2000]}", flush=True)
        self._write()

    def check(self, what: str, passed: bool, found: Any = None) -> None:
        """Store and print a condition that must hold."""
        row = {"what": what, "passed": bool(passed), "found": found}
        self._content["checks"].append(row)
        print(f"{'ok  ' if passed else 'FAIL'} {what}: {found}", flush=True)
        self._write()

    def aim(self, number: int, reached: bool, found: Any) -> None:
        """Store and print a finding for an aim; to miss it is no failure."""
        row = aim_row(number, reached, found)
        self._content.setdefault("aims", []).append(row)
        print(f"aim {number} {'reached' if reached else 'MISSED'}: {found}", flush=True)
        self._write()

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Turn an exception within into a failed check, so that other parts go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(what, False, f"{type(error).__name__}: {error}")

    def finish(self) -> int:
        """Return the exit code: 1 when a check failed."""
        self._content["clocks"]["end"] = gpu_facts(_CLOCKS)
        self._write()
        return int(not all(row["passed"] for row in self._content["checks"]))

    def _write(self) -> None:
        self._content["seconds"] = round(time.monotonic() - self._started, 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._content, indent=1) + "\n")


@dataclass
class Rig:
    """The device as the server has it: one slab, one arena, copy streams."""

    dry: bool
    slab_bytes: int
    library: CudaLibrary | None = None
    arena: DeviceArena | None = None
    copies: Copies | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _lanes: list[Lane] = field(default_factory=list)

    @classmethod
    def open(cls, slab_bytes: int, *, dry: bool, plain: bool = False) -> "Rig":
        """Take the slab, before anything else of torch touches CUDA; with `plain` take none."""
        rig = cls(dry, slab_bytes)
        if not dry:
            rig.library = CudaLibrary()
            if not plain:
                rig.arena = DeviceArena.open(rig.library.slab(0, slab_bytes), slab_bytes)
                rig.arena.install()
            rig.device = torch.device("cuda:0")
            rig.copies = Copies(rig.device)
            if rig.arena is not None:
                # This thread runs tasks in a buffer on the default stream.
                first_products(rig.device)
                rig.synchronize()
        return rig

    def use_kernels(self) -> None:
        """Let ``csr`` run on the device, as lanes do; needs the extension."""
        from serve.lane.cuda.graph_kernels import use_graph_kernels
        from serve.lane.executors import kernels

        if kernels.UNAVAILABLE:
            raise RuntimeError(kernels.UNAVAILABLE)
        if not self.dry:
            use_graph_kernels()

    def lanes(self, count: int) -> list[Lane]:
        """Return that many lanes, the same ones at every call.

        torch has 32 streams of each priority and hands them out in turn, so too many lanes would
        share streams with each other or with the copies. Raises RuntimeError then.
        """
        while len(self._lanes) < count:
            self._lanes.append(Lane(self.queue(), self.memory()))
            self._require_streams_apart()
        return self._lanes[:count]

    def queue(self, reserved_sms: int = 0) -> Queue:
        """Return a lane's queue; bounded runs stay off that many multiprocessors.

        Raises RuntimeError when they cannot be reserved.
        """
        if self.copies is None or self.library is None:
            return HostQueue(bounded=reserved_sms > 0)
        partition = None
        if reserved_sms:
            partition = Partition.open(self.library, 0, reserved_sms)
            if partition is None:
                raise RuntimeError(f"{reserved_sms} multiprocessors cannot be reserved")
        return CudaQueue(self.device, self.copies, Pinned(self.library), partition)

    def memory(self) -> LaneMemory | None:
        """Return a lane's memory."""
        return None if self.arena is None else self.arena.add_lane()

    def _require_streams_apart(self) -> None:
        if self.copies is None:
            return
        used = [self.copies.up.cuda_stream, self.copies.down.cuda_stream]
        used += [stream for lane in self._lanes for stream in lane.streams]
        if len(set(used)) < len(used):
            raise RuntimeError(f"two of {len(used)} streams are one: too many lanes were made")

    def model(self, name: str, features: int, classes: int, hidden: int, layers: int) -> Any:
        """Return a seeded model on the device, in eval mode."""
        made = seeded(name, features, classes, hidden, layers).to(self.device)
        # The copy is on the default stream, which no lane's stream waits for.
        self.synchronize()
        return made

    def synchronize(self) -> None:
        """Wait for the whole device."""
        if not self.dry:
            _cuda.synchronize()

    def time_s(self, work: Callable[[], object], repeats: int = 5) -> list[float]:
        """Return the seconds of `work()` and all it launched, after one run that is not counted."""
        work()
        self.synchronize()
        found = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - started)
        return found

    def in_turns_ms(
        self, ways: Mapping[str, Callable[[], object]], rounds: int
    ) -> dict[str, list[float]]:
        """Return the milliseconds of each way in each round; within a round the ways take turns."""
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, work in ways.items():
                times[name] += [1e3 * taken_s for taken_s in self.time_s(work, 1)]
        return times


def seeded(name: str, features: int, classes: int, hidden: int, layers: int) -> torch.nn.Module:
    """Return a model with weights from seed 0, in eval mode, on the processor."""
    torch.manual_seed(0)
    made = MODELS[name](features, classes, hidden_channels=hidden, num_layers=layers)
    return made.eval().requires_grad_(False)


def relative_error(found: Any, expected: Any) -> float:
    """Return the largest absolute error ÷ the largest expected value; infinite where not finite.

    Both are tensors on the processor or arrays, of one shape.
    """
    found, expected = (np.asarray(values, np.float64) for values in (found, expected))
    error = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))
    return error if math.isfinite(error) else math.inf


def graph(num_nodes: int, num_edges: int, features: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return x float32 [N, F] and edge_index int64 [2, E], seeded, with heavy-tailed degrees."""
    rng = np.random.default_rng(seed)
    edges = generate_edges(num_nodes, num_edges, rng).astype(np.int64)
    x = rng.standard_normal((num_nodes, features), dtype=np.float32)
    return {"x": torch.from_numpy(x), "edge_index": torch.from_numpy(edges).contiguous()}


def spread(values: list[float], digits: int = 3) -> dict[str, Any]:
    """Return median, least, most, and every value in its order."""
    return {
        "median": round(median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "all": [round(value, digits) for value in values],
    }


def run(name: str, about: str | None, body: Callable[[Result, argparse.Namespace], None]) -> None:
    """Run a script: arguments, result, exit code."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dry", action="store_true", help="on the processor; numbers mean nothing")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    faulthandler.enable()
    if arguments.dry:
        # A dry run happens beside other work.
        torch.set_num_threads(1)
    if arguments.dry and arguments.out is None:
        arguments.out = DRY_RESULTS / f"{name}.json"
    result = Result(name, arguments.dry, arguments.out)
    with result.part(name):
        body(result, arguments)
    raise SystemExit(result.finish())
