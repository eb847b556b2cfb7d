"""Copies to the device and back: how fast, and whether they overlap with each other and kernels.

    python -m bench.gpu.staging [--quick] [--dry]

First the bus: GB/s up and down from pageable, pinned and registered memory. Then tasks as lanes do
them (up, forward, answer down), one lane after the other against several lanes at once, where the
copies of one overlap the kernels of others; with copies on streams of their own, as the server has
them, and on the lane's own stream.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.kit import MODELS, Result, Rig, graph, run, spread
from bench.gpu.lanes import Lane, at_once
from serve.lane.cuda.queues import CudaQueue

_cuda: Any = torch.cuda


class OneStream(CudaQueue):
    """Copies on the lane's own stream."""

    def upload(self, tensors: Any) -> dict[str, torch.Tensor]:
        """See ``Queue``."""
        return {n: t.to(self.device, non_blocking=True) for n, t in tensors.items()}

    def download(self, output: torch.Tensor, place: torch.Tensor) -> None:
        """See ``Queue``."""
        place.copy_(output, non_blocking=True)
        ended = _cuda.Event(blocking=True)
        ended.record()
        ended.synchronize()


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(32 << 30, dry=arguments.dry)
    if rig.library is not None:
        with result.part("bus"):
            bus(result, rig)
    tasks = 8 if arguments.quick else 32
    for name in ("gcn",) if arguments.quick else tuple(MODELS):
        with result.part(f"overlap, {name}"):
            overlap(result, rig, name, tasks)


def bus(result: Result, rig: Rig) -> None:
    assert rig.library is not None
    speeds = {}
    for size in (1 << 16, 1 << 20, 16 << 20, 256 << 20):
        there = torch.empty(size, dtype=torch.uint8, device=rig.device)
        registered = torch.empty(size, dtype=torch.uint8)
        rig.library.register(registered.data_ptr(), size)
        kinds = {
            "pageable": torch.empty(size, dtype=torch.uint8),
            "pinned": torch.empty(size, dtype=torch.uint8, pin_memory=True),
            "registered": registered,
        }
        for kind, here in kinds.items():

            def up(a: torch.Tensor = there, b: torch.Tensor = here) -> None:
                a.copy_(b, non_blocking=True)

            def down(a: torch.Tensor = there, b: torch.Tensor = here) -> None:
                b.copy_(a, non_blocking=True)

            for way, work in (("up", up), ("down", down)):
                times = rig.time_s(work, 9)
                speeds[f"{kind} {way} {size}"] = spread([size / 1e9 / t for t in times], 2)
        rig.library.unregister(registered.data_ptr())
    result.put("gb_per_s", speeds)


def overlap(result: Result, rig: Rig, name: str, tasks: int) -> None:
    hidden, layers, nodes = (16, 2, 200) if rig.dry else (256, 8, 8000)
    model = rig.model(name, 500, 16, hidden, layers)
    inputs = graph(nodes, 10 * nodes, 500)
    if not rig.dry:
        inputs = {key: value.pin_memory() for key, value in inputs.items()}

    def together(lanes: list[Lane]) -> Callable[[], object]:
        def share(lane: Lane) -> None:
            for _ in range(tasks // len(lanes)):
                lane.run(model, inputs, 4 << 30)

        return lambda: at_once((lane, partial(share, lane)) for lane in lanes)

    variants = {
        f"{name}, {count} lanes": together(rig.lanes(count, kind))
        for name, kind in (("copy streams", CudaQueue), ("one stream", OneStream))
        for count in (1, 2, 4)
    }
    times: dict[str, list[float]] = {key: [] for key in variants}
    for _ in range(3):
        for key, work in variants.items():
            times[key] += [1e3 * t / tasks for t in rig.time_s(work, 1)]
    result.put(f"ms_per_task {name}", {key: spread(found) for key, found in times.items()})


if __name__ == "__main__":
    run("staging", __doc__, body)
