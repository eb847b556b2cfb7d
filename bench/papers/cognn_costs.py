"""What CoGNN's estimates and decisions cost, in epochs of the queue (its Figure 13).

    python -m bench.papers.cognn_costs [--quick] [--runs 5]

*Estimating* is what this server does before a job's first step: small graphs are traced and give
planes over nodes and edges (``serve.lane.training.measure``). It is done once for a model and the
widths of its data set, whatever the graph. *The closed form* is the authors' own
(``serve.estimate.closed_form``). *Scheduling* is every decision about a queue, its groups included,
as ``bench.papers.cognn`` simulates it, handled again by a new scheduler.

All are processor time of one thread of this machine. An epoch is that of the paper's V100: the work
of all tasks of the queue divided by their epochs. A processor's would be many times longer.
"""

import argparse
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from bench.kit.as_lane import become_lane
from bench.kit.script import Script, Table
from bench.papers.cognn import POLICIES, setup
from bench.papers.cognn_queues import EPOCHS, FIGURE_13, QUEUES, TrainingTask
from bench.papers.gnnsched_costs import deciding, timed
from bench.papers.training_pmc import step_of
from serve.lane.training.measure import fit_step
from serve.native import Meter

SCRIPT = Script(
    "cognn_costs",
    full={"queues": tuple(QUEUES), "tasks": 20, "runs": 5},
    quick={"queues": ("GCN",), "tasks": 2, "runs": 1},
    tables=[
        Table("Costs in epochs of the queue", "rows", {
            "queue": "{queue}", "policy": "{policy}", "epoch, s": "{epoch_s:.2f}",
            "estimating": "{estimate:.2f}", "the closed form": "{closed_form:.5f}",
            "the paper": "{paper_estimate:.1f}", "scheduling": "{schedule:.5f}",
            "the paper ": "{paper_schedule:.1f}",
        }),
    ],
)  # fmt: skip


def epoch_s(queue: Sequence[TrainingTask]) -> float:
    """Return the time of an epoch of all tasks on the paper's GPU, one after the other."""
    return sum(one.work_s for one in queue) / EPOCHS


def estimating_ns(tasks: Sequence[TrainingTask], meter: Meter) -> int:
    """Return what estimating the tasks takes; those of the same widths are estimated once."""
    taken_ns = 0
    for model, widths in dict.fromkeys((one.model, tuple(one.widths)) for one in tasks):
        step = step_of(model, widths)

        def fit(step: Any = step, widths: Sequence[int] = widths) -> None:
            fit_step(step, widths[0], widths[-1], meter)

        taken_ns += timed(fit)
    return taken_ns


def closed_form_ns(tasks: Sequence[TrainingTask]) -> int:
    """Return what the authors' form takes for all tasks."""
    return timed(lambda: [one.peak_bytes for one in tasks])


def rows(options: argparse.Namespace, meter: Meter) -> Iterator[dict[str, Any]]:
    """Yield a row for each queue and policy, beside the paper's."""
    for name in options.queues:
        queue = QUEUES[name]
        unit_ns = 1e9 * epoch_s(queue)
        some = queue[: options.tasks]
        estimate_ns = estimating_ns(some, meter)
        closed_ns = median(closed_form_ns(queue) for _ in range(options.runs))
        for policy in POLICIES:
            tasks, system = setup(policy, name, "full")
            schedule_ns = median(deciding(system, tasks) for _ in range(options.runs))
            paper_estimate, paper_schedule = FIGURE_13[name, policy]
            yield {
                "queue": name, "policy": policy, "tasks": len(some), "epoch_s": unit_ns / 1e9,
                "estimate": estimate_ns / unit_ns, "closed_form": closed_ns / unit_ns,
                "schedule": schedule_ns / unit_ns,
                "paper_estimate": paper_estimate, "paper_schedule": paper_schedule,
            }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figure's rows."""
    meter = become_lane("bench.papers.cognn_costs")
    return {"rows": list(rows(options, meter))}


if __name__ == "__main__":
    become_lane("bench.papers.cognn_costs")
    SCRIPT.main(measure, __doc__)
