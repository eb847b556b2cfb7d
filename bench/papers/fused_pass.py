"""What one pass over a graph for several tasks gains here, and could at most (TurboMGNN's kernels).

    python -m bench.papers.fused_pass [--quick] [--rounds 11]

`k` tasks aggregate features of their own over the same sorted edges. *Apart* is a pass for each.
*As one* is a single pass over features that already lie side by side, [N, k · F]: it reads the
edges once, as a fused kernel would, and jumps less than one, which has k tensors to read. So its
gain is an upper bound of a fused kernel's on this processor. *Put together* is a fused pass that
the kernels at hand can do: features of several tasks are copied side by side, summed in one pass
and taken apart. All take turns, on one thread. The paper's figures are of a V100, forward on arXiv
(`paper`).

Operators are worth fusing where putting them together makes a pass `WORTH` times as fast.
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench.kit.as_lane import become_lane
from bench.kit.measure import elapsed_us, in_turns, quartiles, ratios
from bench.kit.script import Script, Table
from serve.lane.executors.kernels import Csr, aggregate

#: Nodes and edges: the server's usual size, and those of ogbn-arxiv, both directions.
GRAPHS = {"8,000 nodes": (8_000, 80_000), "arXiv's size": (169_343, 2_332_486)}
#: Times as fast, on arXiv, by k.
PAPER = {2: 1.46, 3: 1.50, 4: 1.63, 6: 1.47, 8: 1.38}
#: No round of one case begins after this time.
LONGEST_S = 10.0
#: How much faster a fused pass has to be.
WORTH = 1.15

SCRIPT = Script(
    "fused_pass",
    full={"graphs": tuple(GRAPHS), "parts": (2, 4, 8), "widths": (16, 64, 256), "rounds": 11},
    quick={"graphs": ("8,000 nodes",), "parts": (2,), "widths": (16,), "rounds": 3},
    tables=[
        Table("One pass for several tasks, at most", "rows", {
            "graph": "{graph}", "F": "{width}", "k": "{parts}", "apart, ms": "{apart_ms:.2f}",
            "as one, ms": "{as_one_ms:.2f}",
            "gain, quartiles": "{gain[0]:.2f} {gain[1]:.2f} {gain[2]:.2f}",
            "put together, ms": "{together_ms:.2f}",
            "its gain": "{together_gain[0]:.2f} {together_gain[1]:.2f} {together_gain[2]:.2f}",
            "worth fusing": "{worth}", "paper": "{paper}",
        })
    ],
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each graph, width and number of tasks."""
    rows = []
    for name in options.graphs:
        nodes, edges = GRAPHS[name]
        generator = torch.Generator().manual_seed(0)
        pairs = torch.randint(0, nodes, (2, edges), generator=generator)
        graph = Csr(pairs, nodes, replace_loops=False, edges=False)
        rows += [
            {"graph": name, **compared(graph, width, parts, options.rounds)}
            for width in options.widths
            for parts in options.parts
        ]
    return {"threads": 1, "rows": rows}


def compared(graph: Csr, width: int, parts: int, rounds: int) -> dict[str, Any]:
    """Return times of both ways and their ratio."""
    together = torch.randn(graph.rows, parts * width)
    tensors = [part.contiguous() for part in torch.split(together, width, dim=1)]

    def apart() -> None:
        for tensor in tensors:
            aggregate(graph, tensor)

    ways = {
        "apart": partial(elapsed_us, apart),
        "as_one": partial(elapsed_us, aggregate, graph, together),
        "together": partial(elapsed_us, put_together, graph, tensors),
    }
    times = in_turns(ways, rounds, limit_s=LONGEST_S)
    together_gain = quartiles(ratios(times["apart"], times["together"]), 2)
    return {
        "width": width, "parts": parts, "paper": PAPER.get(parts, ""),
        **{f"{way}_ms": round(statistics.median(us) / 1e3, 3) for way, us in times.items()},
        "gain": quartiles(ratios(times["apart"], times["as_one"]), 2),
        "together_gain": together_gain, "worth": together_gain[1] >= WORTH,
    }  # fmt: skip


def put_together(graph: Csr, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of each tensor [N, F] along the edges, by one pass for all."""
    sums = aggregate(graph, torch.cat(tuple(tensors), dim=1))
    widths = [tensor.shape[1] for tensor in tensors]
    return [part.contiguous() for part in torch.split(sums, widths, dim=1)]


if __name__ == "__main__":
    become_lane("bench.papers.fused_pass")
    SCRIPT.main(measure, __doc__)
