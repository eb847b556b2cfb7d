"""Measure our kernels along edges on the GPU against PyG's and torch.sparse.

    python -m bench.gpu.kernels [--quick] [--dry]

- forward passes of the paper's models on `csr` against PyG as written: milliseconds, peak memory,
  answers against the processor's (of large graphs against PyG's on the GPU);
- aggregation in GB/s of the bytes that have to be read and written, by each variant of the kernels,
  against torch.sparse (cuSPARSE, and whether it gives the same bits every time) and a copy on the
  device: on even and heavy-tailed degrees, and where half of the edges end in four nodes;
- a graph's way to the device: edges int64 or int32, sorted there, against edges that the host has
  sorted, and what that costs the host.

Needs the extension, msgspec and safetensors.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.kit import MODELS, Result, Rig, graph, relative_error, run, spread
from bench.gpu.lanes import task_in
from bench.kit.architectures import wrap
from serve.lane.executors import kernels, with_executor
from serve.lane.executors.kernels import Csr
from serve.lane.models.loader import LoadedModel

LIMIT = 1e-4
FEATURES, CLASSES = 128, 16
SIZES = ((100, 400), (1_000, 10_000), (8_000, 80_000), (50_000, 1_000_000))
MOST_EDGES_ON_HOST = 100_000
WIDTHS = (16, 64, 128, 256)
_cuda: Any = torch.cuda


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(64 << 30, dry=arguments.dry)
    rig.use_kernels()
    sizes = ((50, 200), (100, 400)) if arguments.dry else SIZES[:2] if arguments.quick else SIZES
    models(result, rig, sizes)
    with result.part("aggregation"):
        aggregation(result, rig, sizes)
    with result.part("sorting"):
        sorting(result, rig, sizes)


def twins(rig: Rig, make: Callable[[], torch.nn.Module]) -> dict[str, LoadedModel]:
    """Return the model on both executors on the device, and as PyG on the processor."""
    found = {}
    for name, device in (("eager", rig.device), ("csr", rig.device), ("processor", "cpu")):
        torch.manual_seed(0)
        loaded, _ = wrap(make(), name, ("x", "edge_index"), FEATURES)
        loaded.module.to(device)
        found[name] = with_executor(loaded, "csr") if name == "csr" else loaded
    rig.synchronize()
    return found


def placed(rig: Rig, size: tuple[int, int]) -> dict[str, torch.Tensor]:
    inputs = {key: value.to(rig.device) for key, value in graph(*size, FEATURES).items()}
    rig.synchronize()
    return inputs


def compared(rig: Rig, models: dict[str, LoadedModel], size: tuple[int, int]) -> dict[str, Any]:
    """Return times, peaks and errors of both executors on one graph."""
    inputs, buffer = placed(rig, size), rig.memory()
    if size[1] <= MOST_EDGES_ON_HOST:
        expected = models["processor"].run({k: v.cpu() for k, v in inputs.items()})
    else:
        expected = models["eager"].run(inputs).cpu()
    row: dict[str, Any] = {"nodes": size[0], "edges": size[1]}
    ways = {name: partial(models[name].run, inputs) for name in ("eager", "csr")}
    for name, forward in ways.items():
        with task_in(buffer, 24 << 30):
            output = forward()
            rig.synchronize()
            row[f"{name}_error"] = relative_error(output.cpu(), expected)
            del output
        if buffer is not None:
            row[f"{name}_peak_bytes"] = buffer.peak_bytes()
    row |= {f"{name}_ms": spread(found) for name, found in rig.in_turns_ms(ways, 7).items()}
    row["csr_to_eager"] = round(row["csr_ms"]["median"] / row["eager_ms"]["median"], 3)
    return row


def models(result: Result, rig: Rig, sizes: tuple[tuple[int, int], ...]) -> None:
    rows: dict[str, Any] = {}
    hidden, depth = (16, 2) if rig.dry else (256, 8)
    for name, make in MODELS.items():
        with result.part(f"{name} {depth} x {hidden}"):
            sized = partial(make, FEATURES, CLASSES, hidden_channels=hidden, num_layers=depth)
            both = twins(rig, sized)
            rows[name] = [compared(rig, both, size) for size in sizes]
            result.put("models", rows)
            error = max(row["csr_error"] for row in rows[name])
            result.check(f"{name} on csr within {LIMIT}", error <= LIMIT, error)
            again = [both["csr"].run(placed(rig, sizes[1])) for _ in range(2)]
            result.check(f"{name} gives the same twice, bit by bit", torch.equal(*again))
    ratios = [row["csr_to_eager"] for found in rows.values() for row in found]
    result.put("csr_to_eager", spread(ratios))


def aggregation(result: Result, rig: Rig, sizes: tuple[tuple[int, int], ...]) -> None:
    big = torch.empty((1 << 20) if rig.dry else (1 << 29), dtype=torch.uint8, device=rig.device)
    other = torch.empty_like(big)
    copied = 2 * big.numel() / 1e9 / min(rig.time_s(partial(other.copy_, big)))
    result.put("copy_on_device_gb_per_s", round(copied, 1))
    del big, other
    rows = []
    num_nodes, num_edges = sizes[-1]
    even = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(0))
    tailed = graph(num_nodes, num_edges, 1)["edge_index"]
    hubs = even.clone()
    hubs[1, ::2] %= 4
    for degrees, edges in (("even", even), ("heavy-tailed", tailed), ("hubs", hubs)):
        there = edges.to(rig.device)
        graphs = [
            Csr(there, num_nodes, replace_loops=False, edges=False, variant=at)
            for at in range(len(kernels.VARIANTS))
        ]
        made = graphs[0]
        begin = made.tensor[: num_nodes + 1]
        source = made.tensor[num_nodes + 1 :]
        matrix = torch.sparse_csr_tensor(
            begin, source, torch.ones(num_edges, device=rig.device), (num_nodes, num_nodes)
        )
        for width in WIDTHS:
            x = torch.randn(num_nodes, width, device=rig.device)
            ways = {
                name: partial(kernels.aggregate, one, x)
                for name, one in zip(kernels.VARIANTS, graphs, strict=True)
            }
            times = rig.in_turns_ms({**ways, "torch_sparse": partial(torch.matmul, matrix, x)}, 7)
            gigabytes = (num_edges * (4 + 4 * width) + num_nodes * 4 * width) / 1e9
            speeds = {
                name: spread([1e3 * gigabytes / ms for ms in found], 1)
                for name, found in times.items()
            }
            rows.append({
                "degrees": degrees, "most": int(begin.diff().max()), "width": width,
                "gb_per_s": speeds.pop(kernels.VARIANTS[0]),
                "torch_sparse_gb_per_s": speeds.pop("torch_sparse"),
                "variants_gb_per_s": speeds,
                "torch_sparse_repeats": all(torch.equal(matrix @ x, matrix @ x) for _ in range(5)),
            })  # fmt: skip
    result.put("aggregate", rows)


def sorting(result: Result, rig: Rig, sizes: tuple[tuple[int, int], ...]) -> None:
    """Put the milliseconds until a graph is on the device and sorted, and of a sort on the host."""

    def from_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        pinned = tensor if rig.dry else tensor.pin_memory()
        return lambda: pinned.to(rig.device, non_blocking=True)

    def sort(edges: torch.Tensor, num_nodes: int) -> torch.Tensor:
        return Csr(edges, num_nodes, replace_loops=True, edges=False).tensor

    def sort_there(up: Callable[[], torch.Tensor], num_nodes: int) -> torch.Tensor:
        return sort(up(), num_nodes)

    rows = []
    for num_nodes, num_edges in sizes:
        edges = graph(num_nodes, num_edges, 1)["edge_index"]
        ways: dict[str, Callable[[], object]] = {
            "int64_sorted_there_ms": partial(sort_there, from_host(edges), num_nodes),
            "int32_sorted_there_ms": partial(sort_there, from_host(edges.int()), num_nodes),
            "sorted_before_ms": from_host(sort(edges, num_nodes)),
            "sort_on_host_ms": partial(sort, edges, num_nodes),
        }
        times = rig.in_turns_ms(ways, 7)
        rows.append({
            "nodes": num_nodes, "edges": num_edges,
            **{name: spread(found) for name, found in times.items()},
        })  # fmt: skip
    result.put("sorting", rows)


if __name__ == "__main__":
    run("kernels", __doc__, body)
