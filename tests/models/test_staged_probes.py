"""Whoever measures on a GPU has tensors go up from, and down to, memory as a request's."""

import pytest
import torch

from serve.lane.cuda.capturing import Recorder, replay_most
from serve.lane.cuda.placed_model import ArenaSite, PlacedModel, load_on
from serve.lane.cuda.queues import HostQueue
from serve.lane.executors import choose
from serve.lane.measure.calibrate import calibrate
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.measure.where_measured import Processor
from tests.written_models import written_gcn

ARGS = {"in_channels": 6, "out_channels": 3, "hidden_channels": 8, "num_layers": 2}
MAX_BYTES = 4 << 20


class Watched(HostQueue):
    """Counts copies while somebody takes the time, and those from or to other memory."""

    def __init__(self):
        super().__init__()
        self.timing = False
        self.copies, self.others = 0, 0
        #: Kept, so that no other tensor gets their addresses.
        self._staged = []

    def stage(self, tensors):
        self._staged += tensors.values()
        return dict(tensors)

    def landing(self, output):
        self._staged.append(super().landing(output))
        return self._staged[-1]

    def _note(self, tensor):
        if self.timing and tensor.numel():
            self.copies += 1
            self.others += tensor.data_ptr() not in {t.data_ptr() for t in self._staged}

    def upload(self, tensors):
        for tensor in tensors.values():
            self._note(tensor)
        return super().upload(tensors)

    def fill(self, pairs):
        for tensor, _ in pairs:
            self._note(tensor)
        super().fill(pairs)

    def download(self, pairs):
        for _, place in pairs:
            self._note(place)
        super().download(pairs)


class Timed(Processor):
    """The processor, with a queue's memory and its own clock."""

    def __init__(self, queue):
        self._queue = queue

    stage = ArenaSite.stage

    def time_ns(self, run):
        self._queue.timing = True
        try:
            return super().time_ns(run)
        finally:
            self._queue.timing = False


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return written_gcn(tmp_path_factory.mktemp("repository"), ARGS)


@pytest.mark.parametrize("measure", ["times", "executors", "captures"])
def test_what_is_timed_starts_and_ends_where_requests_lie(spec, measure):
    queue = Watched()
    site = Timed(queue)
    model = PlacedModel.of(load_on(spec, torch.device("cpu"), "eager"), queue)
    signature = probe_signature(model)
    if measure == "times":
        calibrate(model, signature, budget_s=0.1, max_bytes=MAX_BYTES, site=site)
    elif measure == "executors":
        choose._race([model, model], signature, MAX_BYTES, site)
    else:
        replay_most(model, signature, Recorder(queue, None), site)
    assert queue.copies > 10
    assert queue.others == 0
