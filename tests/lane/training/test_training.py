"""A training process's work, done here: it goes on from its checkpoint as if nothing had been."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv, TAGConv

from serve.graphs.load import GraphParts, OpenOptions, held
from serve.ipc.messages import (
    EstimateStep,
    JobSteps,
    JobStopped,
    JobTrained,
    MeasureStep,
    StepMeasured,
    TrainJob,
)
from serve.lane.training import job as training
from serve.lane.training.checkpoint import load_checkpoint, save_checkpoint
from serve.lane.training.measure import fit_step
from serve.lane.training.stack import stack_of
from serve.lane.training.step import TrainingGraph, TrainStep
from serve.models import zoo
from serve.models.community import community_graph
from serve.models.repository import find
from serve.server.training.job_folder import JobFolder

REPOSITORY = Path(__file__).parents[3] / "configs" / "models"


class Dropping(nn.Module):
    """A model whose steps depend on random numbers and that has a buffer which steps change."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(32, 16), GCNConv(16, 5)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x, edge_index):
        hidden = self.norm(self.first(x, edge_index)).relu()
        return self.second(nn.functional.dropout(hidden, 0.5, self.training), edge_index)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A job's folder with the graph of the demo models."""
    path = tmp_path_factory.mktemp("job")
    made = community_graph()
    parts = GraphParts(len(made.x), made.edge_index, made.x, "made", made.y)
    graph = held("community", parts, OpenOptions(), lambda step, share: None)
    JobFolder(path).keep_graph(graph, seed=3)
    return path


def steps_of():
    torch.manual_seed(5)
    return TrainStep(Dropping(), ("x", "edge_index"), 0.01)


def go(step, graph, count):
    return [float(step.run(graph.inputs, graph.rows, graph.labels)) for _ in range(count)]


def test_the_graph_is_split_in_halves_and_kept_as_it_was(folder):
    graph = TrainingGraph.read(folder / "shared" / "graph.safetensors")
    made = community_graph()
    assert len(graph.rows) == len(graph.held_out) == 1000
    assert not np.intersect1d(graph.rows, graph.held_out).size
    assert np.array_equal(graph.labels, made.y[graph.rows])
    assert np.array_equal(graph.inputs["x"], made.x)
    given = {tuple(edge) for edge in made.edge_index.T.tolist()}
    assert {tuple(edge) for edge in graph.inputs["edge_index"].T.tolist()} == given


def test_steps_after_a_checkpoint_are_those_without_one(folder, tmp_path):
    graph = TrainingGraph.read(folder / "shared" / "graph.safetensors")
    whole = steps_of()
    losses = go(whole, graph, 12)
    assert losses[-1] < losses[0]
    first = steps_of()
    assert go(first, graph, 7) == losses[:7]
    path = tmp_path / "shared" / "checkpoint.safetensors"
    path.parent.mkdir()
    save_checkpoint(path, first, 7)
    torch.manual_seed(99)  # another process
    second = TrainStep(Dropping(), ("x", "edge_index"), 0.01)
    assert load_checkpoint(path, second) == 7
    assert go(second, graph, 5) == losses[7:]
    state = whole.module.state_dict()
    for name, tensor in second.module.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert JobFolder(tmp_path).steps_kept() == 7


def test_what_the_first_step_makes_and_keeps_is_known_before_it():
    step = steps_of()
    before = step.persistent_bytes()
    to_come = step.state_to_come_bytes()
    graph = {"x": torch.randn(20, 32), "edge_index": torch.randint(20, (2, 60))}
    step.run(graph, torch.arange(10), torch.zeros(10, dtype=torch.int64))
    assert step.persistent_bytes() - before == to_come > 0
    assert step.state_to_come_bytes() == 0


def test_judging_leaves_no_trace(folder):
    graph = TrainingGraph.read(folder / "shared" / "graph.safetensors")
    judged, other = steps_of(), steps_of()
    torch.manual_seed(1)
    losses = go(other, graph, 3)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        found += go(judged, graph, 1)
        assert 0 <= judged.accuracy(graph) <= 1
    assert found == losses


def message(folder, **fields):
    given = {
        "steps": 30, "learning_rate": 0.01, "seed": 0, "fresh": True, "step_bytes": 1 << 30,
        "checkpoint_s": 60.0,
    } | fields  # fmt: skip
    return TrainJob(find(REPOSITORY, "gcn"), str(folder), **given)


def test_a_job_is_measured_and_trained(folder):
    needs = training.measure_step(MeasureStep(find(REPOSITORY, "gcn"), str(folder)), None)
    assert isinstance(needs, StepMeasured)
    graph = TrainingGraph.read(folder / "shared" / "graph.safetensors")
    assert needs.held_bytes > graph.nbytes
    assert needs.step_bytes > 4 * 64 * graph.size[0]
    said = []
    end = training.train(message(folder), None, said.append)
    assert isinstance(end, JobTrained)
    assert end.accuracy > 0.8
    assert all(isinstance(word, JobSteps) for word in said)
    assert said[-1].steps == said[-1].kept_steps == 30
    assert (
        load_file(folder / "shared" / "weights.safetensors").keys()
        == load_file(REPOSITORY / "gcn" / "1" / "weights.safetensors").keys()
    )
    # All steps are in the checkpoint: once more is no work, and the same weights.
    before = (folder / "shared" / "weights.safetensors").read_bytes()
    assert training.train(message(folder), None, said.append) == end
    assert (folder / "shared" / "weights.safetensors").read_bytes() == before


def test_an_estimate_of_a_step_is_what_a_job_is_measured_to_need(folder):
    spec = find(REPOSITORY, "gcn")
    graph = TrainingGraph.read(folder / "shared" / "graph.safetensors")
    needs = training.measure_step(MeasureStep(spec, str(folder)), None)
    found = training.estimate_step(EstimateStep(spec, *graph.size, 32, 5), None)
    assert found.graph_bytes == graph.nbytes
    assert found.graph_bytes + found.persistent_bytes == needs.held_bytes
    assert found.step_bytes == needs.step_bytes > found.peak_bytes
    assert (found.kind, found.widths[0], found.widths[-1]) == ("gcn", 32, 5)


@pytest.mark.parametrize("kind", ["gcn", "sage", "gin", "gat"])
def test_a_stack_of_one_kind_of_layers_is_known_by_it(kind):
    assert stack_of(getattr(zoo, kind)(12, 5, 64, 3)) == (kind, (12, 64, 64, 5))


@pytest.mark.parametrize(
    "layers",
    [(), (GCNConv(4, 8), SAGEConv(8, 2)), (GCNConv(4, 8), GCNConv(9, 2)), (TAGConv(4, 2),)],
)
def test_other_stacks_are_of_no_kind(layers):
    assert stack_of(nn.ModuleList(layers)) == ("", ())


def test_weights_of_the_model_are_where_it_starts(folder, tmp_path):
    (tmp_path / "shared").mkdir()
    graph = Path("shared") / "graph.safetensors"
    (tmp_path / graph).symlink_to(folder / graph)
    said = []
    end = training.train(message(tmp_path, fresh=False, steps=1), None, said.append)
    assert end.accuracy > 0.95
    assert said[-1].loss < 0.3


def test_what_cannot_be_trained_is_told(folder, tmp_path):
    end = training.train(message(tmp_path), None, print)
    assert isinstance(end, JobStopped)
    assert end.reason == "error"
    assert "graph.safetensors" in end.message


@pytest.mark.parametrize(("rate", "steps"), [(1e30, 5), (1e30, 1)])
def test_a_training_that_diverges_leaves_no_weights(folder, tmp_path, rate, steps):
    shutil.copytree(folder, tmp_path / "job")
    for name in ("checkpoint.safetensors", "weights.safetensors"):
        (tmp_path / "job" / "shared" / name).unlink(missing_ok=True)
    end = training.train(
        message(tmp_path / "job", learning_rate=rate, steps=steps), None, [].append
    )
    assert isinstance(end, JobStopped)
    assert f"is no number; the learning rate is {rate}" in end.message
    assert not (tmp_path / "job" / "shared" / "weights.safetensors").exists()


class Heavy(nn.Module):
    """A model whose gradients alone are larger than what a measured graph may take."""

    def __init__(self):
        super().__init__()
        self.first, self.last = GCNConv(4, 1_800), GCNConv(1_800, 3)
        self.middle = nn.Linear(1_800, 1_800)

    def forward(self, x, edge_index):
        return self.last(self.middle(self.first(x, edge_index)), edge_index)


class Held:
    """A meter that notes the nodes of what it is to measure."""

    def __init__(self):
        self.runs = []

    def held_by(self, run):
        run()
        self.runs.append(run.args[0]["x"].shape[0])
        return 1 << 20


def test_what_kernels_hold_is_measured_whatever_the_weights_take():
    meter = Held()
    fit = fit_step(TrainStep(Heavy(), ("x", "edge_index"), 0.01), 4, 3, meter)
    assert fit.peak_bytes(0, 0) > 12 << 20
    assert len(meter.runs) == 4
    # Graphs so small that weights decide would say nothing of larger ones.
    assert min(meter.runs) > 100
