"""Runs captured and replayed, and the race that says for which sizes: on the processor's queue."""

from contextlib import contextmanager

import pytest
import torch

from serve.lane.cuda.capturing import Recorder, replay_most
from serve.lane.cuda.placed_model import PlacedModel, load_on
from serve.lane.cuda.queues import HostQueue
from serve.lane.cuda.replays import NoRoom
from serve.lane.cuda.streams import StreamKind
from serve.lane.measure.probe_signature import probe_inputs, probe_signature
from serve.lane.measure.where_measured import Processor
from tests.written_models import written_gcn

ARGS = {"in_channels": 6, "out_channels": 3, "hidden_channels": 8, "num_layers": 2}
SHAPES = (("x", "float32", (20, 6)), ("edge_index", "int64", (2, 60)))
INPUTS_BYTES, OUTPUT_BYTES = 4 * 20 * 6 + 8 * 2 * 60, 4 * 20 * 3


class Memory:
    """What an arena would say: as many live bytes as it is told in turn, and refusals."""

    def __init__(self, *live):
        self.live, self.refused, self.entered = list(live), [0, 0], 0

    @contextmanager
    def held(self):
        self.entered += 1
        try:
            yield
        finally:
            self.entered -= 1

    def live_bytes(self):
        assert self.entered == 1
        return self.live.pop(0)

    def refusals(self):
        return self.refused.pop(0)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return written_gcn(tmp_path_factory.mktemp("repository"), ARGS)


@pytest.fixture(params=["eager", "csr"])
def model(spec, request):
    return PlacedModel.of(load_on(spec, torch.device("cpu"), request.param), HostQueue())


def test_a_replay_answers_what_is_asked_now(model):
    recorder = Recorder(HostQueue(), None)
    run = recorder.capture(model, SHAPES)
    for seed in range(3):
        inputs = probe_inputs(20, 60, seed, 6, None)
        expected = model.run(inputs)
        (found,) = recorder.replay(run, inputs, [expected.shape])
        torch.testing.assert_close(found, expected)


def test_what_is_live_afterwards_is_inputs_and_output(model):
    memory = Memory(500, 500 + INPUTS_BYTES + OUTPUT_BYTES)
    Recorder(HostQueue(), memory).capture(model, SHAPES)
    assert memory.entered == 0


def test_a_model_that_keeps_tensors_of_a_run_is_not_captured(model):
    memory = Memory(500, 500 + INPUTS_BYTES + OUTPUT_BYTES + 1)
    with pytest.raises(ValueError, match="keeps tensors of a run"):
        Recorder(HostQueue(), memory).capture(model, SHAPES)


@pytest.mark.parametrize(("after", "kind"), [(4, RuntimeError), (5, NoRoom)])
def test_no_room_is_told_from_other_errors_by_the_count_of_refusals(model, after, kind):
    """Never by the text, which may be lost, and not by refusals of captures before it."""

    class Breaking(HostQueue):
        def capture(self, work):
            raise RuntimeError("API call failed")

    memory = Memory(0)
    memory.refused = [4, after]
    with pytest.raises(kind):
        Recorder(Breaking(), memory).capture(model, SHAPES)
    assert memory.entered == 0


class Timed(Processor):
    """Times as told: launched and replayed in turn, at each size."""

    def __init__(self, *shares):
        self._times = [t for share in shares for _ in range(7) for t in (1000, int(1000 * share))]

    def time_ns(self, run):
        run()
        return self._times.pop(0)


def test_the_largest_size_that_gains_five_per_cent_is_the_limit(model):
    signature, recorder = probe_signature(model), Recorder(HostQueue(), None)
    site = Timed(0.5, 0.94, 0.96)
    assert replay_most(model, signature, recorder, site) == (128 + 1_024, "")
    assert site._times == []
    found = replay_most(model, signature, recorder, Timed(0.99))
    assert found == (0, "they take 0.99 of the time of launched ones")


def test_what_cannot_be_captured_is_not_raced(model):
    class Breaking(HostQueue):
        def capture(self, work):
            raise RuntimeError("operation not permitted when stream is capturing")

    most, why = replay_most(model, probe_signature(model), Recorder(Breaking(), None), Timed())
    assert most == 0
    assert "not permitted" in why


def test_larger_sizes_that_have_no_room_are_left_out(model):
    class Small(Recorder):
        def capture(self, model, inputs, kind=StreamKind.ORDINARY):
            inputs = list(inputs)
            if inputs[0][2][0] > 16:
                raise NoRoom("they need more memory than captured runs have")
            return super().capture(model, inputs, kind)

    signature, recorder = probe_signature(model), Small(HostQueue(), None)
    assert replay_most(model, signature, recorder, Timed(0.5)) == (16 + 64, "")


def test_a_capture_that_gives_other_answers_is_not_used(model, caplog):
    class Stale(HostQueue):
        def fill(self, pairs):
            """As if the model had read its inputs when it was captured."""

    found = replay_most(model, probe_signature(model), Recorder(Stale(), None), Timed())
    assert found == (0, "they give other answers")
    assert "captured runs give other answers" in caplog.text
