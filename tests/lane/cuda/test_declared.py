"""A lane that is a thread runs models that declare their inputs, and waits for nothing itself."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from bench.kit import gallery
from serve.interface import DTYPES
from serve.ipc.messages import Part, RunTask, TaskDone, TaskError, TensorRef
from serve.lane.cuda.buckets import bucket
from serve.lane.cuda.placed_model import PlacedModel
from serve.lane.cuda.queues import HostQueue
from serve.lane.cuda.replays import FixedRun, Replays, RunShape
from serve.lane.executors.check import needs_exact_sizes
from serve.lane.executors.csr import with_csr
from serve.lane.models.sizing import sizing_of
from serve.lane.place import Replaying
from serve.models.repository import find
from serve.server.declared_inputs import output_bytes, output_refs
from serve.server.staging import Staged, plan_layout
from tests.lane.cuda.test_recurring_runs import POOL_BYTES, RECUR, Rig
from tests.lane.waits import Counting

#: Three kinds of edges; two outputs, of nodes and of edges; pooled, by a number read off a batch.
MODELS = "to_hetero", "attention", "molecules"
#: Kinds of edges; labelled pairs.
REPLAYED = "rgcn", "links"
_WIRE = {name: wire for wire, name in DTYPES.items()}


class Device(HostQueue):
    """The processor as a device; counts what waits for it while a run is open."""

    waits = 0

    @contextmanager
    def running(self, kind=None):
        with Counting() as counting:
            yield
        self.waits += counting.waits

    def upload(self, tensors):
        self.uploaded = [tensor.data_ptr() for tensor in tensors.values()]
        return super().upload(tensors)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    return root, {name: gallery.write(root, name) for name in MODELS}


@pytest.fixture
def rig():
    found = Rig()
    found.place._queue = found.place._recurring._queue = Device()
    yield found
    found.close()


def counts_for(interface, size, seed):
    return tuple(size + (seed + at) % 3 for at in range(len(interface.counts)))


def parts_of(rig, interface, requests):
    """Put the requests in the pool; the part of a task for each, as the server makes it."""
    parts, start = [], 0
    for arrays in requests:
        shapes = {name: array.shape for name, array in arrays.items()}
        sizes = dict(zip(interface.counts, interface.counts_of(shapes), strict=True))
        layout = plan_layout(
            shapes,
            tuple(slot.name for slot in interface.inputs),
            output_bytes(interface.outputs, interface.sizes(tuple(sizes.values()))),
            dtypes={slot.name: slot.dtype for slot in interface.inputs},
        )
        refs = [TensorRef(r.name, r.dtype, r.shape, start + r.offset_bytes) for r in layout.inputs]
        for ref in refs:
            content = np.ascontiguousarray(arrays[ref.name]).tobytes()
            rig.pool[ref.offset_bytes : ref.offset_bytes + len(content)] = content
        output_at = start + layout.input_bytes
        interface.graph_counts(interface.largest(arrays), sizes)
        staged = Staged(None, tuple(refs), output_at, layout.output_capacity_bytes)
        outputs = output_refs(interface.outputs, sizes, staged)
        parts.append(
            Part(tuple(refs), output_at, layout.output_capacity_bytes, None, outputs, False)
        )
        start += layout.size_bytes
    assert start <= POOL_BYTES - 4096
    return tuple(parts)


def outputs_in(rig, part):
    found = {}
    for ref in part.outputs:
        size = ref.size_bytes
        raw = rig.pool[ref.offset_bytes : ref.offset_bytes + size]
        found[ref.name] = np.frombuffer(raw, ref.dtype).reshape(ref.shape)
    return found


@pytest.mark.parametrize("how_many", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_lane_runs_it(rig, models, name, how_many):
    root, loaded = models
    interface = gallery.interface(loaded[name])
    rig.load(find(root, name), replay_most=0)
    requests = [
        gallery.request(loaded[name], counts_for(interface, 12 * (seed + 1), seed), seed)
        for seed in range(how_many)
    ]
    parts = parts_of(rig, interface, requests)
    before = [{r.name: rig.pool[r.offset_bytes : r.offset_bytes + r.size_bytes] for r in p.inputs}
              for p in parts]  # fmt: skip
    held = rig.lane._models["m"]
    # What a model's own code reads on the device is its author's choice.
    tensors = {key: torch.from_numpy(array) for key, array in requests[0].items()}
    forward, sizes = held.loaded.declared, held.loaded.declared.sizes(tensors)
    with torch.inference_mode(), Counting() as own:
        forward.returned(held.loaded.module, tensors, sizes)
    assert (own.waits > 0) == (name != "to_hetero"), own.names
    for _ in range(2):
        rig.place._queue.waits = 0
        answer = rig.place.run(RunTask(5, "m", parts, 1 << 30, 0), held)
        assert isinstance(answer, TaskDone), answer
        assert (answer.rows, answer.columns) == ((0,) * how_many, 0)
        assert rig.place._queue.waits == own.waits
        for part, arrays in zip(parts, requests, strict=True):
            expected = gallery.expected(loaded[name], arrays)
            found = outputs_in(rig, part)
            assert found.keys() == expected.keys()
            for output, wanted in expected.items():
                scale = 1e-4 * float(np.abs(wanted).max())
                np.testing.assert_allclose(found[output], wanted, rtol=0, atol=scale)
    # The lane ran on copies of what lies in the pool.
    after = [{r.name: rig.pool[r.offset_bytes : r.offset_bytes + r.size_bytes] for r in p.inputs}
             for p in parts]  # fmt: skip
    assert after == before


def test_outputs_that_are_not_as_their_places_fail_the_task_alone(rig, models):
    root, loaded = models
    interface = gallery.interface(loaded["attention"])
    rig.load(find(root, "attention"), replay_most=0)
    arrays = gallery.request(loaded["attention"], (12, 30), 1)
    (part,) = parts_of(rig, interface, [arrays])
    wrong = TensorRef("y", "float32", (11, 3), part.outputs[0].offset_bytes)
    bad = Part(part.inputs, part.output_offset_bytes, part.output_capacity_bytes, None,
               (wrong, part.outputs[1]), False)  # fmt: skip
    held = rig.lane._models["m"]
    answer = rig.place.run(RunTask(5, "m", (bad,), 1 << 30, 0), held)
    assert isinstance(answer, TaskError)
    assert "output 'y' has shape [12, 3]; it must have [11, 3]" in answer.message
    assert isinstance(rig.place.run(RunTask(6, "m", (part,), 1 << 30, 0), held), TaskDone)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_measured_with_copies_there_and_back(models, name):
    _, loaded = models
    placed = PlacedModel.of(loaded[name], Device())
    arrays = gallery.request(
        loaded[name], counts_for(gallery.interface(loaded[name]), 20, 1), seed=3
    )
    inputs = {key: torch.from_numpy(array) for key, array in arrays.items()}
    found = placed.outputs(inputs)
    assert placed.queue.uploaded == [tensor.data_ptr() for tensor in inputs.values()]
    for one, wanted in zip(found, loaded[name].outputs(inputs), strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    return root, {name: gallery.write(root, name) for name in REPLAYED}


def replaying(rig, spec, executor):
    model, site = rig.place.load_to_measure(spec, executor)
    trial = rig.place.load_to_try(spec)
    return rig.place.replaying(model, rig.signature_of(spec), site, trial)


def ask(rig, loaded, requests):
    """Run one task; its answers are the model's."""
    interface = gallery.interface(loaded)
    parts = parts_of(rig, interface, requests)
    answer = rig.place.run(RunTask(5, "m", parts, 1 << 30, 0), rig.lane._models["m"])
    assert isinstance(answer, TaskDone), answer
    assert (answer.rows, answer.columns) == ((0,) * len(parts), 0)
    rig.place.tidy(answer)
    for part, arrays in zip(parts, requests, strict=True):
        found = outputs_in(rig, part)
        for output, wanted in gallery.expected(loaded, arrays).items():
            scale = 1e-4 * float(np.abs(wanted).max(initial=0))
            np.testing.assert_allclose(found[output], wanted, rtol=0, atol=scale)


@pytest.mark.parametrize("name", REPLAYED)
def test_one_capture_serves_all_that_its_sizes_hold(rig, replayed, launches, name):
    root, loaded = replayed
    model, interface = loaded[name], gallery.interface(loaded[name])
    assert needs_exact_sizes(with_csr(gallery.load(name)), rig.signature_of(find(root, name))) == ""
    rig.load(find(root, name), replay_most=10_000, executor="csr", any_size=True)

    def request(seed, share=1):
        counts = (23, 70, 70)[: len(interface.counts)]
        return gallery.request(model, [(most - seed) // share for most in counts], seed)

    for seed in range(3):
        ask(rig, model, [request(seed)])
    assert len(launches) == 2
    # A union as one graph, and one that is smaller: what was there before is no edge of it.
    ask(rig, model, [request(seed, share=3) for seed in (2, 3, 4)])
    ask(rig, model, [request(5)])
    assert (len(launches), len(rig.place._recurring.replays)) == (4, 1)


def test_a_model_that_needs_exact_sizes_is_captured_for_those(rig, models, launches, monkeypatch):
    root, loaded = models
    monkeypatch.setattr("serve.lane.cuda.capturing._WORTH", math.inf)
    found = replaying(rig, find(root, "attention"), "csr")
    assert not found.any_size
    assert found.reason.startswith("captured for exact sizes only: on a graph that is empty it")
    launches.clear()
    rig.load(find(root, "attention"), replay_most=10_000, executor="csr")
    for seed in range(RECUR + 2):
        ask(rig, loaded["attention"], [gallery.request(loaded["attention"], (12, 30), seed)])
    assert len(launches) == 2
    ask(rig, loaded["attention"], [gallery.request(loaded["attention"], (12, 31), 1)])
    assert len(launches) == 2


def test_no_run_is_captured_where_values_tell_sizes(rig, models):
    root, _ = models
    found = replaying(rig, find(root, "molecules"), "eager")
    assert found == Replaying(reason="runs are not captured: values tell the number of G")


def test_nearly_all_of_a_mixed_trace_of_declared_models_is_replayed(replayed):
    """Of one lane, by counting: sizes over two orders of magnitude."""
    _, loaded = replayed
    rng = np.random.default_rng(3)
    replays = Replays(lambda shape: FixedRun({}, HostQueue().capture(lambda: ())))
    requests, hits = 10_000, 0
    interfaces = [gallery.interface(model) for model in loaded.values()]
    for _ in range(requests):
        number = int(rng.integers(len(interfaces)))
        interface = interfaces[number]
        nodes = int(10 ** rng.uniform(1.5, 3.5))
        counts = interface.spread(nodes, int(nodes * rng.uniform(3, 12)))
        sizes = dict(zip(interface.counts, counts, strict=True))
        inputs = [(slot.name, slot.dtype, slot.shape_for(sizes)) for slot in interface.inputs]
        shape = RunShape(str(number), bucket(sizing_of(interface), inputs, sizes), is_bucket=True)
        hits += replays.find(shape) is not None
        replays.capture_due(idle=True)
    assert hits > 0.95 * requests
