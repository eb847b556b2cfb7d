"""A model on a device of several lanes; on the processor, whose queue does everything at once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from bench.kit.waiting import PATIENCE_S
from serve.lane.cuda.placed_model import PlacedModel, load_on
from serve.lane.cuda.queues import HostQueue
from serve.lane.executors.csr import with_csr
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


def test_lanes_that_share_a_model_do_not_share_what_a_run_remembers(spec, monkeypatch):
    """One lane's end must not cost the other its sorted graph: its memory was not reserved."""
    loaded = load_on(spec, torch.device("cpu"), "csr")
    sorted_in = []
    made = with_csr.__globals__["kernels"].Csr.__init__

    def watched(self, *args, **named):
        sorted_in.append(args[0].shape[1])
        made(self, *args, **named)

    monkeypatch.setattr("serve.lane.executors.kernels.Csr.__init__", watched)
    together = Barrier(2)
    first = next(m for m in loaded.module.modules() if "forward" in vars(m))
    inner = first.forward

    def meeting(*args, **named):
        out = inner(*args, **named)
        if args[0].shape[0] == 30:
            # The other run begins and ends here, between two layers of this one.
            together.wait(PATIENCE_S)
            together.wait(PATIENCE_S)
        return out

    monkeypatch.setattr(first, "forward", meeting)

    def other():
        together.wait(PATIENCE_S)
        loaded.run(probe_inputs(20, 60, 1, 6, None))
        together.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(other)
        loaded.run(probe_inputs(30, 90, 1, 6, None))
        running.result(PATIENCE_S)
    assert sorted(sorted_in) == [60, 90]
