"""A model on a device of several lanes; on the processor, whose queue does everything at once."""

import pytest
import torch

from serve.lane.cuda.placed_model import PlacedModel, load_on
from serve.lane.cuda.queues import HostQueue
from serve.lane.executors import CannotRun, kernels
from serve.lane.measure.probe_signature import probe_inputs
from tests.written_models import written_gcn

ARGS = {"in_channels": 6, "out_channels": 3, "hidden_channels": 8, "num_layers": 3}


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return written_gcn(tmp_path_factory.mktemp("repository"), ARGS)


def test_an_executor_goes_with_the_model(spec):
    loaded = load_on(spec, torch.device("cpu"), "csr")
    placed = PlacedModel.of(loaded, HostQueue())
    assert (placed.executor, placed.after_run) == ("csr", loaded.after_run)
    inputs = probe_inputs(20, 60, 1, 6, None)
    expected = load_on(spec, torch.device("cpu"), "eager").run(inputs)
    torch.testing.assert_close(placed.run(inputs), expected)


def test_where_a_device_has_no_kernels_of_ours_csr_cannot_run(spec, monkeypatch):
    monkeypatch.setattr(kernels, "devices", set())
    with pytest.raises(
        CannotRun, match=r"libgnnserve_cuda\.so, which has its kernels, is not used"
    ):
        load_on(spec, torch.device("cpu"), "csr")
    assert load_on(spec, torch.device("cpu"), "eager").executor == "eager"
