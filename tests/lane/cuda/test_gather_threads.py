"""How many threads gather over the bus: the fewest that keep it busy, as measured for the model."""

from types import SimpleNamespace

import msgspec
import pytest

from serve.estimate.calibration import Calibration
from serve.ipc.messages import ProbeModel
from serve.lane.cuda import gather_threads
from serve.lane.cuda.gather_threads import THREADS, fewest_threads, find_threads
from serve.lane.cuda.queues import HostQueue
from serve.native_cuda import CudaError
from tests.lane.cuda.test_recurring_runs import ARGS, FEATURES, Rig
from tests.written_models import written_gcn


class Memory:
    """Pinned memory, and a lane's buffer, as they are asked for."""

    def __init__(self, *, refuses=False):
        self.refuses, self.pinned, self.said = refuses, {}, []

    def register(self, address, size_bytes):
        if self.refuses:
            raise CudaError("no memory can be pinned here")
        self.pinned[address] = size_bytes

    def unregister(self, address):
        del self.pinned[address]

    def most_bytes(self):
        return 1 << 30

    def insert(self, size_bytes):
        self.said.append(f"insert {size_bytes}")

    def clear(self):
        self.said.append("clear")
        return 0


class Bus(HostQueue):
    """A device whose gather is limited by its threads, and by the bus from `enough` on."""

    def __init__(self, monkeypatch, memory, enough, *, fails=False):
        super().__init__()
        self.now_ns, self.enough, self.fails, self.memory = 0, enough, fails, memory
        self.sizes, self.rounds = set(), []
        clock = SimpleNamespace(now_ns=lambda: self.now_ns)
        monkeypatch.setattr(gather_threads, "clock", clock)

    def gather(self, table, ids, hot=None, *, placed=None, threads=0):
        assert self.memory.pinned == {table.data_ptr(): table.nbytes}
        assert placed is not None
        assert len(set(ids[:100].tolist())) == 100
        if self.fails:
            raise RuntimeError("the device failed")
        self.sizes.add(table.nbytes)
        # The first run of each compiles its kernel.
        cold = 10**9 if threads not in self.rounds else 0
        self.rounds.append(threads)
        self.now_ns += cold + 10**12 // min(threads, self.enough)
        return table[:0]


def test_the_fewest_threads_that_are_nearly_as_fast_as_the_best_are_taken():
    assert fewest_threads({1024: 4.0, 2048: 2.0, 4096: 1.04, 8192: 1.0}) == 4096
    assert fewest_threads({1024: 4.0, 2048: 2.0, 4096: 1.06, 8192: 1.0}) == 8192
    # More threads may be slower.
    assert fewest_threads({1024: 1.0, 2048: 0.99, 4096: 1.5}) == 1024


@pytest.mark.parametrize("enough", [THREADS[0], 20_000, 1 << 30])
def test_a_model_gathers_by_as_many_as_its_bus_needs(monkeypatch, enough):
    memory = Memory()
    bus = Bus(monkeypatch, memory, enough)
    found = find_threads(bus, memory, memory, 64)
    # The 32,768 above 20,000; the most that is tried where that is too little still.
    assert found == min(t for t in THREADS if t >= min(0.95 * enough, THREADS[-1]))
    assert memory.said == [f"insert {1 << 30}", "clear"]
    assert memory.pinned == {}
    assert bus.sizes == {64 << 20}


def test_where_no_memory_can_be_pinned_nothing_is_measured(monkeypatch):
    memory = Memory(refuses=True)
    assert find_threads(Bus(monkeypatch, memory, 1), memory, memory, 64) == 0
    assert memory.said == []


def test_a_gather_that_fails_leaves_nothing_behind(monkeypatch):
    memory = Memory()
    assert find_threads(Bus(monkeypatch, memory, 1, fails=True), memory, memory, 64) == 0
    assert memory.pinned == {}
    assert memory.said == [f"insert {1 << 30}", "clear"]


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("insert", MemoryError("the device has no bytes left for the task's buffer")),
        ("unregister", CudaError("an earlier kernel failed")),
    ],
)
def test_whatever_fails_leaves_it_out_alone(monkeypatch, caplog, where, error):
    memory = Memory()

    def fail(_):
        raise error

    monkeypatch.setattr(memory, where, fail)
    caplog.set_level("INFO")
    assert find_threads(Bus(monkeypatch, memory, 1), memory, memory, 64) == 0
    assert str(error) in caplog.text


def test_where_the_host_has_no_memory_nothing_is_measured(monkeypatch):
    memory = Memory()
    bus = Bus(monkeypatch, memory, 1)
    # No machine has the memory for one row of so many features.
    assert find_threads(bus, memory, memory, 1 << 55) == 0
    assert memory.said == []


def test_calibration_keeps_what_was_found(tmp_path, monkeypatch):
    spec, asked = written_gcn(tmp_path, ARGS), []
    rig = Rig(replay_bytes=0)

    def find(queue, pinned, memory, num_features):
        asked.append(num_features)
        return 1 << 15

    monkeypatch.setattr("serve.lane.cuda.place.find_threads", find)
    try:
        # The processor in a device's stead reads no memory over a bus.
        assert rig.place.gather_threads(rig.signature_of(spec)) == 0
        object.__setattr__(rig.device, "pinned", Memory())
        said = rig.lane._probe(ProbeModel(spec, 0.1, 64 << 20, "eager"))
    finally:
        rig.close()
    found = msgspec.msgpack.decode(said.calibration, type=Calibration)
    assert (found.gather_threads, asked) == (1 << 15, [FEATURES])
