"""A lane answers packets without Python where a captured run serves them, and as Python would."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.kit import gallery
from serve.ipc import messages
from serve.ipc.messages import (
    MemoryTaken,
    Part,
    RunTask,
    Stop,
    TakesLess,
    TaskDone,
    TaskError,
    TensorRef,
    UnloadModel,
)
from serve.lane.cuda.buckets import bucket_counts, served_counts
from serve.lane.cuda.device import CudaDevice
from serve.lane.cuda.replays import FixedRun, Replays, RunShape
from serve.lane.cuda.streams import StreamKind
from serve.lane.models.sizing import SHORT
from serve.models import zoo
from serve.models.repository import find
from serve.models.writer import write_model
from serve.native_cuda import CudaError
from tests.lane.cuda.test_declared import counts_for, outputs_in, parts_of
from tests.lane.cuda.test_device_memory import Memory
from tests.lane.cuda.test_recurring_runs import ARGS, CLASSES, FEATURES, RECUR, Rig
from tests.processes import PATIENCE_S, wait_for

#: Captured for buckets of sizes; of exact sizes, without an input `x`.
DECLARED = {"rgcn": True, "links": True, "to_hetero": False}


class Served(Rig):
    """A lane that serves its channel in a thread of its own."""

    def begin(self):
        self.ours.settimeout(PATIENCE_S)
        self._thread = threading.Thread(target=self.lane.serve, daemon=True)
        self._thread.start()
        assert isinstance(self.hear(), messages.LaneStarted)
        return self

    def end(self):
        self.ours.send(messages.encode(Stop()))
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.close()

    def hear(self):
        # pytest names the test in the environment, which is a setting that models share.
        while isinstance(
            said := messages.decode_from_lane(self.ours.recv(messages.MAX_PACKET_BYTES)),
            messages.SettingsRestored,
        ):
            pass
        return said

    def say(self, message):
        self.ours.send(messages.encode(message))

    def run(self, parts, *, key="m", run_ns=0, bounded=False):
        self.say(RunTask(9, key, tuple(parts), 1 << 30, run_ns, bounded))
        return self.hear()

    def part(self, nodes, edges, *, at=0, fill=None, dtype=np.int64):
        """Put a graph into the pool; returns its part of a task, and what the model answers."""
        x = self.rng.standard_normal((nodes, FEATURES), dtype=np.float32)
        if fill is not None:
            x[:] = fill
        pairs = self.rng.integers(0, max(nodes, 1), (2, edges)).astype(dtype)
        refs, start = [], at * (128 << 10)
        for name, value in (("x", x), ("edge_index", pairs)):
            self.pool[start : start + value.nbytes] = value.tobytes()
            refs.append(TensorRef(name, value.dtype.name, value.shape, start))
            start += -(-value.nbytes // 64) * 64
        expected = self.reference.run(
            {"x": torch.from_numpy(x), "edge_index": torch.from_numpy(pairs.astype(np.int64))}
        )
        return Part(tuple(refs), start, 4 * nodes * CLASSES), expected.numpy()

    def check(self, asked, **options):
        """Run parts as one task; the answers are the model's."""
        done = self.run([part for part, _ in asked], **options)
        assert isinstance(done, TaskDone), done
        assert done.rows == tuple(len(expected) for _, expected in asked)
        assert done.columns == CLASSES
        for part, expected in asked:
            start = part.output_offset_bytes
            found = np.frombuffer(self.pool[start : start + expected.nbytes], np.float32)
            np.testing.assert_allclose(
                found.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5
            )
        return done

    def capture(self, asked, **options):
        """Run parts as one task, of a size that is captured then."""
        replays = self.place._recurring.replays
        before = len(replays)
        self.check(asked, **options)
        # The answer leaves before the capture; the next packet would put it off.
        wait_for(lambda: len(replays) == before + 1, "the capture")

    def looped(self):
        """Return how many runs the loop has replayed."""
        runs = self.place._recurring.replays._runs.values()
        loop = self.place._recurring._loop
        return max((loop.used(run.looped) for run in runs if run.looped), default=0)


def write_gcn(root, check_output=""):
    torch.manual_seed(0)
    write_model(root, "gcn", zoo.gcn(**ARGS), factory="serve.models.zoo:gcn", args=ARGS)
    if check_output:
        (config,) = (root / "gcn").rglob("*.toml")
        text = config.read_text()
        config.write_text(text.replace("[model]\n", f'[model]\ncheck_output = "{check_output}"\n'))
    return find(root, "gcn")


@pytest.fixture
def rig(tmp_path):
    found = Served(reserved_sms=8)
    found.load(write_gcn(tmp_path), executor="csr", any_size=True)
    found.begin()
    yield found
    found.end()


def test_what_is_captured_is_answered_without_python(rig):
    rig.capture([rig.part(20, 60)])
    assert rig.looped() == 0
    for number, (nodes, edges) in enumerate([(20, 60), (17, 0), (24, 64), (20, 1)], 1):
        done = rig.check([rig.part(nodes, edges)])
        assert rig.looped() == number
        assert done.run_ns > 0
        assert (done.peak_bytes, done.held_bytes, done.nonfinite) == (None, None, ())
    rig.check([rig.part(16, 60)])
    rig.check([rig.part(25, 60)])
    assert rig.looped() == 4


def test_merged_requests_are_too(rig):
    rig.capture([rig.part(20, 60)])
    rig.check([rig.part(5, 10), rig.part(9, 20, at=1), rig.part(8, 0, at=2)])
    assert rig.looped() == 1


def test_edges_of_another_dtype_have_a_capture_of_their_own(rig):
    rig.capture([rig.part(20, 60)])
    asked = [rig.part(20, 60, dtype=np.int32), rig.part(1, 2, at=1, dtype=np.int32)]
    rig.capture(asked)
    assert rig.looped() == 0
    rig.check(asked)
    assert rig.looped() == 1


def test_each_stream_has_captures_of_its_own(rig):
    other = rig.device.urgency.add_lane()
    rig.device.urgency.begin(other, 1000)
    for run_ns, bounded in ((10, False), (999, False), (10, True)):
        before = rig.looped()
        rig.capture([rig.part(20, 60)], run_ns=run_ns, bounded=bounded)
        assert rig.looped() == before
        rig.check([rig.part(20, 60)], run_ns=run_ns, bounded=bounded)
        assert rig.looped() == before + 1
    kinds = {shape.kind for shape in rig.place._recurring.replays._runs}
    assert kinds == set(StreamKind)


def test_what_is_larger_than_what_gains_is_launched(rig):
    rig.capture([rig.part(400, 590)])
    rig.check([rig.part(400, 600)])
    assert rig.looped() == 1
    rig.check([rig.part(400, 601)])
    assert rig.looped() == 1


@pytest.mark.parametrize(("check", "error"), [("", False), ("finite", True), ("off", False)])
def test_values_that_are_not_finite_are_told_as_ever(tmp_path, check, error):
    rig = Served()
    rig.load(write_gcn(tmp_path, check), executor="csr", any_size=True)
    rig.begin()
    rig.capture([rig.part(20, 60)])
    part, _ = rig.part(20, 60, fill=np.inf)
    for _ in range(2):
        found = rig.run([part])
        assert isinstance(found, TaskError) == error, found
        assert error or bool(found.nonfinite) == (check != "off")
    rig.check([rig.part(20, 60)])
    rig.end()


def test_python_takes_over_what_fails(rig, caplog):
    rig.capture([rig.part(20, 60)])
    (run,) = rig.place._recurring.replays._runs.values()
    launch, calls = run.captured.launch, []

    def fails():
        calls.append(1)
        raise CudaError("cudaGraphLaunch: unspecified (cudaError 999)")

    run.captured.launch = fails
    rig.check([rig.part(20, 60)])
    assert "a captured run failed (cudaError 999)" in caplog.text
    # By the loop, and by Python, which gives it up then and has launched it.
    assert len(calls) == 2
    assert len(rig.place._recurring.replays) == 0
    run.captured.launch = launch
    rig.check([rig.part(20, 60)])


def test_what_is_unloaded_is_answered_no_more(rig):
    part, _ = asked = rig.part(20, 60)
    rig.capture([asked])
    rig.say(UnloadModel("m"))
    assert "not loaded" in rig.run([part]).message


def test_what_is_due_is_captured_once_no_packet_waits(rig):
    rig.capture([rig.part(20, 60)])
    # Another lane captures while this one launches a run of a new size, so that it is put off.
    with rig.device.capturing:
        rig.check([rig.part(40, 60)])
    rig.capture([rig.part(20, 60)])
    rig.check([rig.part(40, 60)])
    assert rig.looped() >= 1


@pytest.mark.parametrize(("name", "any_size"), DECLARED.items())
def test_models_that_declare_their_inputs_are_answered_too(tmp_path, name, any_size):
    rig = Served()
    model = gallery.write(tmp_path, name)
    interface = gallery.interface(model)
    executor = "csr" if any_size else "eager"
    rig.load(find(tmp_path, name), executor=executor, replay_most=100_000, any_size=any_size)
    rig.begin()

    def ask(*sizes):
        requests = [
            gallery.request(model, counts_for(interface, size, 0), seed)
            for seed, size in enumerate(sizes)
        ]
        parts = parts_of(rig, interface, requests)
        found = rig.run(parts)
        assert isinstance(found, TaskDone), found
        assert (found.rows, found.columns) == ((0,) * len(parts), 0)
        for part, arrays in zip(parts, requests, strict=True):
            tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
            with torch.inference_mode():
                expected = rig.reference.outputs(tensors)
            for value, array in zip(expected, outputs_in(rig, part).values(), strict=True):
                np.testing.assert_allclose(array, value.numpy(), rtol=1e-4, atol=1e-5)

    for _ in range(1 if any_size else RECUR):
        ask(9)
    wait_for(lambda: len(rig.place._recurring.replays) == 1, "the capture")
    ask(9)
    assert rig.looped() == 1
    if any_size:
        ask(10)
        ask(4, 5)
        assert rig.looped() == 3
    # Where the loop does not, Python replays it.
    for run in rig.place._recurring.replays._runs.values():
        run.looped.drop()
    ask(9)
    rig.end()


class Counting(Memory):
    """Its peaks are more than any inputs."""

    def peak_bytes(self):
        return 1 << 20

    held_peak_bytes = peak_bytes


def test_memory_that_others_could_use_is_given_back_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(CudaDevice, "memory_of_captures", lambda device: None)
    arena = SimpleNamespace(add_lane=Counting, static_bytes=0, outlived_bytes=0)
    rig = Served(arena=arena, slab_bytes=64 << 30)
    rig.load(write_gcn(tmp_path), executor="csr", any_size=True)
    assert isinstance(rig.hear(), MemoryTaken)
    rig.begin()
    rig.capture([rig.part(20, 60)])
    assert rig.run([rig.part(20, 60)[0]]) == TakesLess(9, 0)
    assert isinstance(rig.hear(), TaskDone)
    assert rig.looped() == 1
    rig.end()


class Looped:
    """A captured run that the loop replays when it is told to."""

    def __init__(self):
        self.used = self.dropped = 0

    def used_again(self):
        used, self.used = self.used, 0
        return used

    def drop(self):
        self.dropped += 1


class Captured:
    outputs = ()
    handle = 0

    def launch(self): ...

    def forget(self): ...


def test_what_the_loop_has_replayed_is_kept():
    runs = {}

    def capture(shape):
        runs[shape.key] = FixedRun({}, Captured(), looped=Looped())
        return runs[shape.key]

    replays = Replays(capture, most=3, after=1)
    for key in "abcd":
        if key == "d":
            runs["a"].looped.used, runs["b"].looped.used = 2, 1
        replays.find(RunShape(key, ()))
        replays.capture_due(idle=True)
    assert [key for key, run in runs.items() if run.looped.dropped] == ["c"]
    assert [shape.key for shape in replays._runs] == ["b", "a", "d"]


@given(st.sampled_from("NE"), st.integers(0, 100_000))
def test_counts_that_a_bucket_serves_are_those_that_are_given_it(symbol, count):
    def room(number):
        return bucket_counts(SHORT, {symbol: number})[symbol]

    least, most = served_counts(SHORT, symbol, room(count))
    assert least <= count <= most == room(count)
    assert room(least) == room(most)
    assert room(most + 1) != room(most)
    assert least == 0 or room(least - 1) != room(least)
