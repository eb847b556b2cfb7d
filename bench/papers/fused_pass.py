"""What a fused pass over a graph for several tasks gains here (TurboMGNN's kernels).

    python -m bench.papers.fused_pass [--quick] [--rounds 9]

`k` tasks aggregate features of their own over the same sorted edges. *Apart* is a pass of the
server's kernel for each. The fused kernel (``bench.papers.aggregate_many``) reads the edges for
several tasks at once, in one of three orders: *by rows*, *in pairs*, *in fours*. *Put together* is
a fused pass without such a kernel: features are copied side by side, summed in one pass and taken
apart. All give the same bits, and take turns. Cases:

- `sums`: forward passes, on one core.
- `two lanes`: two lanes, pinned to a core each, do this at once with tensors of their own.
- `forward and backward`: half of the tasks are in their backward pass. Apart, that gathers along
  the reversed edges; fused, along the same edges as the others, whose weights are permuted.

Graphs are generated with heavy-tailed degrees and local edges, in both directions. The paper's
figures are of a V100, forward on arXiv (`paper`). A fused pass is worth it where in three of four
rounds its best order is `WORTH` times as fast.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.kit.as_lane import become_lane
from bench.kit.measure import elapsed_us, in_turns, quartiles, ratios
from bench.kit.script import Script, Table
from bench.papers.aggregate_many import LAYOUTS, Layout, aggregate_many
from serve.graphs.generate import generate_edges
from serve.lane.executors.kernels import Csr, aggregate, normalised, spread

#: Nodes and edges: the server's usual size, those of ogbn-arxiv in both directions, and a resident
#: graph's.
GRAPHS = {
    "8,000 nodes": (8_000, 80_000),
    "arXiv's size": (169_343, 2_332_486),
    "a million nodes": (1_000_000, 10_000_000),
}
#: Features of all tasks of a case take at most so much.
MOST_BYTES = 0.7e9
#: Tasks of the cases other than `sums`; the paper's best number on arXiv.
PARTS_ELSEWHERE = 4
#: Times as fast, on arXiv, by k.
PAPER = {2: 1.46, 3: 1.50, 4: 1.63, 6: 1.47, 8: 1.38}
#: No round of one case begins after this time.
LONGEST_S = 3.0
#: How much faster a fused pass has to be.
WORTH = 1.15
LANES = 2

Ways = dict[str, Callable[[], Any]]

SCRIPT = Script(
    "fused_pass",
    full={"graphs": tuple(GRAPHS), "parts": (2, 4, 8), "widths": (16, 64, 256), "rounds": 9},
    quick={"graphs": ("8,000 nodes",), "parts": (2, 4), "widths": (16,), "rounds": 3},
    tables=[
        Table("One pass for several tasks: times as fast as a pass for each", "rows", {
            "graph": "{graph}", "case": "{case}", "F": "{width}", "k": "{parts}",
            "apart, ms": "{apart_ms:.2f}",
            **{
                way.replace("_", " "):
                f"{{{way}[0]:.2f}} {{{way}[1]:.2f}} {{{way}[2]:.2f}}" for way in LAYOUTS
            },
            "put together": "{together[1]:.2f}", "worth it": "{worth}", "paper": "{paper}",
        })
    ],
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each graph, width, number of tasks and case."""
    rows = []
    for name in options.graphs:
        nodes, edges = GRAPHS[name]
        graph = graph_of(nodes, edges)
        for width in options.widths:
            for parts in options.parts:
                if nodes * width * parts * 4 > MOST_BYTES:
                    continue
                for case, ways in cases(graph, width, parts):
                    rows.append({
                        "graph": name, "case": case, "width": width, "parts": parts,
                        "paper": PAPER.get(parts, "") if case == "sums" else "",
                        **compared(ways, options.rounds),
                    })  # fmt: skip
    return {"rows": rows}


def graph_of(nodes: int, edges: int) -> Csr:
    """Return a generated graph with edges in both directions."""
    pairs = generate_edges(nodes, edges, np.random.default_rng(0))
    return Csr(torch.from_numpy(pairs), nodes, replace_loops=False, edges=True)


def cases(graph: Csr, width: int, parts: int) -> Iterator[tuple[str, Ways]]:
    """Yield the cases and their ways, one at a time as they hold many tensors."""
    yield "sums", sums(graph, random_features(graph, width, parts))
    if parts == PARTS_ELSEWHERE:
        yield "two lanes", in_two_lanes(graph, width, parts)
        yield "forward and backward", hybrid(graph, random_features(graph, width, parts))


def random_features(graph: Csr, width: int, parts: int) -> list[Tensor]:
    """Return features of so many tasks, float32 [N, width]."""
    return [torch.randn(graph.rows, width) for _ in range(parts)]


def sums(graph: Csr, features: Sequence[Tensor]) -> Ways:
    """Return the ways to sum each task's features over its neighbours."""
    return {
        "apart": lambda: [aggregate(graph, tensor) for tensor in features],
        **{layout: partial(aggregate_many, graph, features, layout) for layout in LAYOUTS},
        "together": partial(put_together, graph, features),
    }


def put_together(graph: Csr, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of each tensor [N, F] along the edges, by one pass for all."""
    found = aggregate(graph, torch.cat(tuple(tensors), dim=1))
    widths = [tensor.shape[1] for tensor in tensors]
    return [part.contiguous() for part in torch.split(found, widths, dim=1)]


def hybrid(graph: Csr, tensors: Sequence[Tensor]) -> Ways:
    """Return the ways to sum with weights, forward for one half and backward for the other.

    `graph` has its edges in both directions and records them: only then is the gradient a sum along
    the same edges, with the weight of each edge's reverse.
    """
    weight = normalised(graph, None)
    backward = spread(graph.reversed, weight[: graph.slots], 0.0)
    half = len(tensors) // 2
    weights = [weight] * half + [backward] * (len(tensors) - half)

    def apart() -> list[Tensor]:
        return [aggregate(graph, tensor, weight) for tensor in tensors[:half]] + [
            aggregate(graph.reversed, tensor, backward) for tensor in tensors[half:]
        ]

    return {
        "apart": apart,
        **{layout: partial(aggregate_many, graph, tensors, layout, weights) for layout in LAYOUTS},
    }


def in_two_lanes(graph: Csr, width: int, parts: int) -> Ways:
    """Return the ways of `sums` in two threads at once, with tensors of their own."""
    free = count()
    cores = sorted(os.sched_getaffinity(0))

    def pin() -> None:
        os.sched_setaffinity(0, {cores[next(free) % len(cores)]})  # of this thread alone

    lanes = [ThreadPoolExecutor(1, initializer=pin) for _ in range(LANES)]
    ways = [sums(graph, random_features(graph, width, parts)) for _ in lanes]

    def both(way: str) -> list[Any]:
        waiting = [lane.submit(own[way]) for lane, own in zip(lanes, ways, strict=True)]
        return [one.result() for one in waiting]

    return {way: partial(both, way) for way in ways[0]}


def compared(ways: Ways, rounds: int) -> dict[str, Any]:
    """Return how many times as fast as apart each way is, and whether a fused one is worth it."""
    timed = {name: partial(elapsed_us, way) for name, way in ways.items()}
    times = in_turns(timed, rounds, limit_s=LONGEST_S)
    gains = {
        name: quartiles(ratios(times["apart"], found), 2)
        for name, found in times.items()
        if name != "apart"
    }
    best: Layout = max(LAYOUTS, key=lambda layout: gains[layout][0])
    return {
        "apart_ms": round(statistics.median(times["apart"]) / 1e3, 3),
        "rounds": len(times["apart"]), **gains, "best": best, "worth": gains[best][0] >= WORTH,
    }  # fmt: skip


if __name__ == "__main__":
    become_lane("bench.papers.fused_pass")
    SCRIPT.main(measure, __doc__)
