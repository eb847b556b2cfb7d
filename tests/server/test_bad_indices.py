"""A model that a probe graph gives a bad index: refused or spared, never run on the device."""

import msgspec
import pytest

from serve.estimate.calibration import Calibration
from serve.ipc.messages import ModelFailed, ModelProbed, ProbeModel
from serve.lane.cuda.placed_model import PlacedModel
from serve.models.repository import find
from serve.models.writer import write_model
from tests.lane.cuda.test_recurring_runs import Rig
from tests.server.picky import Picky


@pytest.fixture
def on_device(monkeypatch):
    """Bad indices that came as far as the device, and runs there."""
    found = {"bad": 0, "runs": 0}
    inner = PlacedModel.run

    def watched(self, inputs):
        found["runs"] += 1
        try:
            return inner(self, inputs)
        except IndexError:
            found["bad"] += 1
            raise

    monkeypatch.setattr(PlacedModel, "run", watched)
    return found


def probed(folder, executor, **args):
    write_model(folder, "m", Picky(**args), factory="tests.server.picky:Picky", args=args)
    rig = Rig()
    try:
        return rig.lane._probe(ProbeModel(find(folder, "m"), 0.1, 32 << 20, executor))
    finally:
        rig.close()


def test_a_model_that_no_probe_graph_suits_is_refused_in_words(tmp_path, on_device):
    answer = probed(tmp_path, "auto", kind="feature", rows=4)
    assert isinstance(answer, ModelFailed)
    assert "IndexError" in answer.message
    assert on_device["runs"] == 0


@pytest.mark.parametrize("executor", ["auto", "csr", "eager"])
def test_graphs_that_a_model_refuses_are_spared_the_device(tmp_path, on_device, executor):
    """Degrees are small but for a star's and where all edges are loops."""
    answer = probed(tmp_path, executor, kind="degree", rows=250)
    assert isinstance(answer, ModelProbed), answer
    calibration = msgspec.msgpack.decode(answer.calibration, type=Calibration)
    assert calibration.memory.activations
    assert on_device["bad"] == 0
    assert on_device["runs"] > 10
