"""Check our kernels on nodes with very many neighbours, and on odd widths.

    python -m tests.gpu.heavy [--quick] [--plain] [--dry]

From 513 neighbours on (257 in one variant) several teams reduce one row in pieces, which few rows
of the other benches need. Here are stars of 513, 2,049, 5,000 and 100,000, rows that end where a
piece does, and a power law of many heavy rows; with edges int64 and int32, with loops added or not,
of widths that fill a team or not. Sorting, all reductions and all scores of attention, by each
variant of the kernels, are compared with float64 on the processor, and must give the same bits
twice.

`--plain` runs without the arena, so that compute-sanitizer sees where each tensor ends. `--dry`
runs the same sources on the processor, thread by thread, where the build has them.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.kit import Result, Rig, run
from serve.lane.cuda.graph_kernels import graph_kernels, simulated_kernels
from serve.lane.executors.kernels import VARIANTS
from serve.native_cuda import library_path

LIMIT = 1e-4
HEADS, SLOPE = 2, 0.2
REDUCTIONS = ("sum", "sum"), ("mean", "mean"), ("max", "amax"), ("min", "amin")
SCORES = "additive", "dynamic", "dot"
PLAIN = "--plain"


def graphs(quick: bool) -> Iterator[tuple[str, int, Tensor]]:
    """Yield name, number of nodes and edges int64 [2, E] in random order."""
    generator = torch.Generator().manual_seed(0)

    def rows(degrees: list[int], num_nodes: int) -> Tensor:
        """Return edges with these in-degrees of the first nodes, loops among them."""
        target = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees))
        source = torch.randint(num_nodes, (len(target),), generator=generator)
        order = torch.randperm(len(target), generator=generator)
        return torch.stack([source, target])[:, order]

    for degree in (513, 5000) if quick else (513, 2049, 5000, 100_000):
        yield f"a star of {degree}", 300, rows([0, degree, *[3] * 200], 300)
    # A row of more than 512 is heavy; pieces are of 256 slots, wherever rows begin.
    yield "rows that end with a piece", 100, rows([256, 512, 768, 1, 511, 1024, 0, 5], 100)
    tail = [2500] * 4 if quick else [20_000 // (1 + rank) for rank in range(100)]
    yield "heavy rows side by side", len(tail) + 50, rows(tail, len(tail) + 50)


def body(result: Result, arguments: argparse.Namespace, *, plain: bool) -> None:
    simt = library_path("libgnnserve_simt.so")
    if arguments.dry and simt is None:
        result.check("dry run ends here", True)
        return
    rig = Rig.open(8 << 30, dry=arguments.dry, plain=plain)
    rig.use_kernels()
    kernels = simulated_kernels(str(simt)) if rig.dry else graph_kernels()
    quick = arguments.quick or arguments.dry
    worst: dict[str, float] = {}
    for name, num_nodes, edges in graphs(quick):
        for dtype, loops in product((torch.int64, torch.int32), (False, True)):
            kind = f"{name}, {dtype}, {'loops added' if loops else 'as it is'}"
            with result.part(kind):
                there = edges.to(dtype).to(rig.device)
                made, again = (kernels["csr"](there, num_nodes, loops, True) for _ in range(2))
                found = Sorted(made.cpu(), num_nodes)
                alike = found.is_like(Sorted(again.cpu(), num_nodes))
                result.check(f"{kind}: sorted", alike and found.holds(edges, loops))
                for width in (64,) if dtype == torch.int32 else (6, 64) if quick else (6, 64, 250):
                    errors = compared(rig, kernels, made, found, width)
                    key = f"{kind}, {width} wide"
                    worst[key] = max(errors.values())
                    result.check(f"{key} within {LIMIT}", worst[key] <= LIMIT, errors)
    # None when nothing could be compared, which a failed check tells.
    result.put("worst_relative_error", max(worst.values(), default=None))


def same_twice(work: Callable[[], Tensor]) -> Tensor:
    """Return the result; raises RuntimeError when the second call gives other bits."""
    first, second = work().clone(), work()
    if not torch.equal(first, second):
        raise RuntimeError("the same work gave other bits the second time")
    return second


class Sorted:
    """A graph as the device sorted it, on the processor."""

    def __init__(self, made: Tensor, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.room = (len(made) - num_nodes - 1) // 2
        begin = made[: num_nodes + 1].long()
        self.slots = int(begin[-1])
        self.source = made[num_nodes + 1 :][: self.slots].long()
        self.edge = made[num_nodes + 1 + self.room :][: self.slots]
        self.row = torch.arange(num_nodes).repeat_interleave(begin.diff())

    def is_like(self, other: "Sorted") -> bool:
        """Return True when both are equal bit by bit, unused slots aside."""
        names = "row", "source", "edge"
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in names)

    def holds(self, edges: Tensor, loops: bool) -> bool:
        """Return True when it has each edge once; with `loops`, one loop of every node instead."""
        if loops:
            added = torch.arange(self.num_nodes).expand(2, -1)
            edges = torch.cat([edges[:, edges[0] != edges[1]], added], dim=1)
        wanted = edges[1] * self.num_nodes + edges[0]
        found = self.row * self.num_nodes + self.source
        return torch.equal(found.sort().values, wanted.sort().values)

    def reduced(self, values: Tensor, kind: str) -> Tensor:
        """Return `values` [slots, F] reduced by row; 0 for an empty row."""
        out = torch.zeros(self.num_nodes, values.shape[1], dtype=values.dtype)
        index = self.row[:, None].expand_as(values)
        return out.scatter_reduce_(0, index, values, kind, include_self=False)

    def attention(self, score: Tensor, value: Tensor) -> Tensor:
        """Return `value` [N, H · C] of the sources, weighted by softmax of `score` [slots, H]."""
        weight = (score - self.reduced(score, "amax")[self.row]).exp()
        share = weight / self.reduced(weight, "sum")[self.row]
        parts = by_head(value)[self.source] * share[:, :, None]
        return self.reduced(parts.flatten(1), "sum")

    def scores(self, score: str, left: Tensor, right: Tensor, att: Tensor) -> Tensor:
        """Return the scores [slots, H] as csrc/include/gnnserve/aggregate.hpp defines them."""
        left, right = left[self.source], right[self.row]
        if score == "additive":
            return functional.leaky_relu(left + right, SLOPE)
        if score == "dynamic":
            return by_head(att * functional.leaky_relu(left + right, SLOPE)).sum(2)
        return SLOPE * by_head(left * right).sum(2)


def by_head(x: Tensor) -> Tensor:
    return x.view(len(x), HEADS, -1)


def compared(
    rig: Rig, kernels: Mapping[str, Any], made: Tensor, found: Sorted, width: int
) -> dict[str, float]:
    """Return the relative error of every reduction and score; raises when bits differ."""
    generator = torch.Generator().manual_seed(width)
    rows = found.num_nodes
    shapes = {
        "x": (rows, width), "skip": (rows, width), "bias": (width,), "att": (width,),
        "weight": (found.room,), "left": (rows, HEADS), "right": (rows, HEADS),
        "other": (rows, width),
    }  # fmt: skip
    here = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    there = {name: value.to(rig.device) for name, value in here.items()}
    exact = {name: value.double() for name, value in here.items()}
    finish = there["skip"], 0.5, there["bias"], True
    errors: dict[str, float] = {}

    def compare(name: str, work: Callable[[], Tensor], expected: Tensor) -> None:
        error = (same_twice(work).cpu().double() - expected).abs().max()
        errors[name] = float(error / expected.abs().max().clamp(min=1e-6))

    weighted = exact["x"][found.source] * exact["weight"][: found.slots, None]
    for code, (name, kind) in enumerate(REDUCTIONS):
        expected = found.reduced(weighted, kind) + 0.5 * exact["skip"] + exact["bias"]
        for number, variant in enumerate(VARIANTS):
            work = partial(
                kernels["aggregate"], made, there["x"], there["weight"], code, *finish, number
            )
            compare(f"{name}, {variant}", work, expected.relu())
    for code, score in enumerate(SCORES):
        names = ("left", "right") if score == "additive" else ("x", "other")
        left, right = (there[name] for name in names)
        scored = found.scores(score, exact[names[0]], exact[names[1]], exact["att"])
        expected = found.attention(scored, exact["x"])
        for number, variant in enumerate(VARIANTS):
            work = partial(
                kernels["attend"], made, True, False, code, left, right, there["x"], HEADS, SLOPE,
                False, there["att"], None, None, None, number,
            )  # fmt: skip
            compare(f"{score}, {variant}", work, expected)
    return errors


if __name__ == "__main__":
    asked = PLAIN in sys.argv
    if asked:
        sys.argv.remove(PLAIN)
    run("heavy", __doc__, partial(body, plain=asked))
