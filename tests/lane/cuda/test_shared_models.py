"""Models of lanes that are threads of one process: modules apart, weights together."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from bench.kit.waiting import PATIENCE_S
from serve.ipc.messages import LoadModel
from serve.lane.cuda.device import SharedModels
from serve.lane.measure.probe_signature import probe_inputs
from serve.models import zoo
from serve.models.repository import find
from serve.models.writer import write_model

ARGS = {"in_channels": 6, "out_channels": 3, "hidden_channels": 8, "num_layers": 3}
CPU = torch.device("cpu")


class Keeper(torch.nn.Module):
    """Keeps on itself what the middle of its forward pass made, as PyG's attention does."""

    #: Where two runs meet between keeping and reading.
    meeting = Barrier(2)

    def __init__(self, **args):
        super().__init__()
        self.gcn = zoo.gcn(**args)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, edge_index):
        self.kept = self.scale * self.gcn(x, edge_index)
        if self.meeting.n_waiting or x.shape[0] > 20:
            self.meeting.wait(PATIENCE_S)
        return self.kept


@pytest.fixture(scope="module")
def message(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    factory = f"{__name__}:Keeper"
    write_model(root, "keeper", Keeper(**ARGS), factory=factory, args=ARGS)
    spec = find(root, "keeper")
    return LoadModel(spec.key, spec, signature=None)


@pytest.fixture
def models():
    return SharedModels()


def state(model):
    return model.module.state_dict()


@pytest.mark.parametrize("executor", ["eager", "csr"])
def test_a_run_reads_what_it_kept_and_not_what_another_lane_kept(models, message, executor):
    message = LoadModel(message.key, message.spec, signature=None, executor=executor)
    first, second = (models.take(message, CPU) for _ in range(2))
    small, large = (probe_inputs(nodes, 3 * nodes, 1, 6, None) for nodes in (20, 30))
    with ThreadPoolExecutor(1) as threads:
        # The large run waits in the middle of its forward pass for the small one.
        running = threads.submit(first.run, large)
        while not Keeper.meeting.n_waiting:
            assert not running.done()
        found = second.run(small)
        assert running.result(PATIENCE_S).shape[0] == 30
    assert found.shape[0] == 20


def test_weights_are_there_once(models, message):
    first, second = (state(models.take(message, CPU)) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)
    with models.settled() as size_bytes:
        assert size_bytes == message.spec.weights_bytes


def test_a_lane_that_unloads_leaves_the_others_their_weights(models, message):
    first, second = (models.take(message, CPU) for _ in range(2))
    inputs = probe_inputs(10, 30, 1, 6, None)
    expected = second.run(inputs)
    models.give_back(message.key, first)
    assert all(tensor.is_meta for tensor in state(first).values())
    third = models.take(message, CPU)
    assert torch.equal(second.run(inputs), expected)
    assert torch.equal(third.run(inputs), expected)


def test_the_last_lane_frees_them(models, message):
    model = models.take(message, CPU)
    models.give_back(message.key, model)
    with models.settled() as size_bytes:
        assert size_bytes == 0
    assert all(tensor.is_meta for tensor in state(model).values())
