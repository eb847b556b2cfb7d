"""TurboMGNN's operator matching, counted: fused operators, and when each task ends.

    python -m bench.papers.turbomgnn [--quick] [--iterations 500]

Counts only; nothing is run. A task is an iteration of training, repeated: its sparse products along
edges in order, forward and then backward. GCN and GIN have one a layer (`spmm`). GAT has four, as
the paper takes it apart: scores (`sddmm`), the softmax's sums and quotients (`spmm`, `sddmm`), the
aggregation (`spmm`). As there, the first layer has its backward products too.

*Aligned* fuses forward with forward and backward with backward, and starts an iteration of all
tasks together. *Matched* is ``serve.core.rules.fusing``, where a product forward is of the same
kind as one backward. A task's end is counted in fused operators that ran before it.

*In groups* fuses only tasks that are alike. The groups then contend for the device: `SLOWDOWN` is
what runs that each keep 0.7 of it busy do to one another, as CoGNN's Figure 4 says of a V100. Their
mean end of one iteration is counted for groups in turn, all side by side, and in sets by contention
(``serve.core.rules.contention``).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.kit.script import Script, Table
from serve.core.rules.contention import ends_of, set_after_set
from serve.core.rules.fusing import Program, chain, ends, grouped, match

#: Kinds of a layer's sparse products, forward.
LAYER = {"gcn": ("spmm",), "gin": ("spmm",), "gat": ("sddmm", "spmm", "sddmm", "spmm")}
#: Of a run, by how many others run beside it.
SLOWDOWN = tuple(max(1.0, 0.7 * (1 + others)) for others in range(8))
SCRIPT = Script(
    "turbomgnn",
    full={"iterations": 500},
    quick={"iterations": 3},
    tables=[
        Table("Fused operators of one iteration, and mean ends over all iterations", "mixes", {
            "tasks": "{tasks}", "operators": "{operators}", "aligned": "{aligned}",
            "matched": "{matched}", "in groups": "{in_groups}",
            "mean end, aligned": "{end_aligned}",
            "mean end, matched": "{end_matched}", "sooner by": "{sooner:.3f}", "paper": "{paper}",
        }),
        Table("Groups of one iteration that slow one another: mean ends", "mixes", {
            "tasks": "{tasks}", "groups": "{groups}", "in turn": "{in_turn:.2f}",
            "side by side": "{side_by_side:.2f}", "by contention": "{by_contention:.2f}",
            "sets": "{sets}",
        }),
    ],
)  # fmt: skip


@dataclass(frozen=True)
class Mix:
    """Tasks that run together: (model, layers) of each."""

    tasks: tuple[tuple[str, int], ...]
    figure: str
    #: What the paper measured of matched beside aligned tasks; empty where it tells nothing.
    paper: str = ""

    @property
    def name(self) -> str:
        """Models and layers, equal ones counted."""
        counted = {task: self.tasks.count(task) for task in self.tasks}
        return ", ".join(
            f"{count} × {model.upper()} of {layers}" for (model, layers), count in counted.items()
        )


MIXES = (
    Mix((("gcn", 4), ("gcn", 3)), "1"),
    Mix((("gcn", 2), ("gcn", 2), ("gcn", 3), ("gcn", 4)), "8", "1.9 ÷ 1.30 = 1.46"),
    Mix((("gcn", 2), ("gat", 2)), "3"),
    Mix((*[("gcn", 2)] * 4, *[("gin", 2)] * 4, *[("gat", 2)] * 2), "9"),
)


def stages(model: str, layers: int) -> tuple[list[str], list[str]]:
    """Return the kinds of an iteration's products, forward and backward."""
    forward = list(LAYER[model]) * layers
    return forward, forward[::-1]


def iteration(model: str, layers: int, times: int = 1) -> Program:
    """Return a task of so many iterations."""
    forward, backward = stages(model, layers)
    return chain([*forward, *backward], times)


def aligned(tasks: Sequence[tuple[str, int]], iterations: int) -> tuple[int, list[int]]:
    """Return the fused operators of one iteration by stages, and when each task ends."""
    both = [match([chain(stages(*task)[stage]) for task in tasks]) for stage in (0, 1)]
    forward, each = len(both[0]), len(both[0]) + len(both[1])
    before = (iterations - 1) * each + forward
    return each, [before + end for end in ends(both[1], len(tasks))]


def in_groups(programs: Sequence[Program]) -> tuple[list[int], list[int]]:
    """Return each group's fused operators and tasks, where only tasks of a group are fused."""
    groups = grouped(programs)
    fused = [len(match([programs[task] for task in group])) for group in groups]
    return fused, [len(group) for group in groups]


def contending(fused: Sequence[int]) -> dict[str, Any]:
    """Return the mean end of groups with so many fused operators each, by who runs beside whom."""
    shortest_first = sorted(range(len(fused)), key=lambda group: fused[group])
    chosen = set_after_set(fused, SLOWDOWN)
    ways: dict[str, list[tuple[int, ...]]] = {
        "in_turn": [(group,) for group in shortest_first],
        "side_by_side": [tuple(shortest_first)],
        "by_contention": chosen,
    }
    means = {name: fmean(ends_of(sets, fused, SLOWDOWN)) for name, sets in ways.items()}
    return {**means, "sets": [len(members) for members in chosen]}


def row_of(mix: Mix, iterations: int) -> dict[str, Any]:
    """Return what the tasks come to."""
    once = [iteration(*task) for task in mix.tasks]
    fused, sizes = in_groups(once)
    each, ends_aligned = aligned(mix.tasks, iterations)
    repeated = [iteration(*task, iterations) for task in mix.tasks]
    ends_matched = ends(match(repeated), len(repeated))
    return {
        "tasks": mix.name, "figure": mix.figure, "paper": mix.paper,
        "operators": sum(map(len, once)), "aligned": each, "matched": len(match(once)),
        "in_groups": sum(fused), "groups": sizes, **contending(fused),
        "most_members": max(map(len, match(once))),
        "ends_aligned": ends_aligned, "ends_matched": ends_matched,
        "end_aligned": fmean(ends_aligned), "end_matched": fmean(ends_matched),
        "sooner": fmean(ends_aligned) / fmean(ends_matched),
    }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each mix of tasks."""
    return {
        "iterations": options.iterations,
        "mixes": [row_of(mix, options.iterations) for mix in MIXES],
    }


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
