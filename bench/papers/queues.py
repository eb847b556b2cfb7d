"""The task queues of the GNNSched paper's evaluation, on one machine.

Three models of 8 layers × 256 on 25 subgraphs of each of four graphs, with the features and classes
of that graph (Table 4). A queue has 100 tasks: those of one model, or as many drawn from all three
(MIX). Tasks arrive in slots: "the number that arrive at one time" is Poisson of mean 1 (low load)
or 2 (high load). The paper does not say how long a slot is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.scheduling.site import site_of
from serve.config import Config, ModelsConfig
from serve.core.types import TaskEstimate
from serve.graphs.datasets import TABLE_4
from serve.models import zoo
from serve.models.writer import write_model
from serve.sim.device import Offered
from serve.sim.workload import mean_solo_ns, offered
from serve.workload import (
    GraphRef,
    PoolSpec,
    TraceHeader,
    WorkloadTask,
    build_trace,
    workload_tasks,
)

MODELS = ("gcn", "sage", "gin")
QUEUES = (*MODELS, "mix")
#: Mean number of tasks that arrive at one time.
LOADS = {"low": 1.0, "high": 2.0}
LENGTH = 100
QOS_FACTOR = 2.0
HIDDEN, LAYERS = 256, 8
#: Tasks of MPS-Base that run at once, which never were too much for the paper's device.
_AT_ONCE = 4
#: Graphs of a data set that are about alike.
_ALIKE = 5


@dataclass(frozen=True)
class Queues:
    """Graphs, and what a task takes: `estimate(model for a data set, nodes, edges)`."""

    refs: Sequence[GraphRef]
    estimate: Callable[[str, int, int], TaskEstimate]

    def tasks(self, queue: str, seed: int) -> list[WorkloadTask]:
        """Return the tasks of a queue in random order; a model is one for its data set."""
        return [
            WorkloadTask(model_for(task.model, task.graph.dataset), task.graph)
            for task in workload_tasks(queue, self.refs, seed, MODELS)
        ]

    def mean_solo_s(self, queue: str, seed: int) -> float:
        """Return the mean solo time of the queue's tasks."""
        return mean_solo_ns([_shape(task) for task in self.tasks(queue, seed)], self.estimate) / 1e9

    def requests(self, queue: str, mean_batch: float, slot_s: float, seed: int) -> list[Offered]:
        """Return the queue as it arrives; true run times are 10 % off the estimates."""
        header = TraceHeader(
            workload=queue, seed=seed, arrivals="slots", rate_hz=mean_batch / slot_s,
            mean_batch=mean_batch,
        )  # fmt: skip
        trace = build_trace(header, self.tasks(queue, seed), count=LENGTH)
        return offered(trace, self.estimate, QOS_FACTOR)

    def alike(self) -> "Queues":
        """Return the queues with the largest graphs of each data set only, in turns."""
        refs = []
        for dataset in dict.fromkeys(ref.dataset for ref in self.refs):
            its = sorted(
                (ref for ref in self.refs if ref.dataset == dataset),
                key=lambda ref: (ref.num_edges, ref.num_nodes),
            )
            largest = its[-_ALIKE:]
            refs += [
                replace(largest[number % len(largest)], index=number) for number in range(len(its))
            ]
        return Queues(refs, self.estimate)

    def four_tasks_bytes(self) -> int:
        """Return the memory in which any four tasks fit, as four always fitted in the paper."""
        shapes = {_shape(task) for queue in MODELS for task in self.tasks(queue, 0)}
        needed = sorted(self.estimate(*shape).reserve_bytes for shape in shapes)
        return sum(needed[-_AT_ONCE:])


def model_for(model: str, dataset: str) -> str:
    """Return the name of a model with the features and classes of a data set."""
    return f"{model}-{dataset}"


def _shape(task: WorkloadTask) -> tuple[str, int, int]:
    return task.model, task.graph.num_nodes, task.graph.num_edges


def queues_here(folder: Path, datasets: tuple[str, ...]) -> tuple[Queues, int, dict[str, str]]:
    """Return the queues with times and memory calibrated on this machine, its cores, and sources.

    Takes a few seconds for each of the three models of a data set. Times do not depend on their
    random weights.
    """
    torch.manual_seed(0)
    names = []
    for model in MODELS:
        for dataset in datasets:
            spec = TABLE_4[dataset]
            args = {
                "in_channels": spec.num_features, "out_channels": spec.num_classes,
                "hidden_channels": HIDDEN, "num_layers": LAYERS,
            }  # fmt: skip
            name = model_for(model, dataset)
            module = getattr(zoo, model)(**args)
            write_model(folder, name, module, factory=f"serve.models.zoo:{model}", args=args)
            names.append(name)
    models = ModelsConfig(repository=str(folder), cache=str(folder / "cache"))
    site = site_of(Config(models=models), names, PoolSpec(datasets=datasets))
    return Queues(site.pool.refs, site.estimate), site.cores, site.pool.sources
