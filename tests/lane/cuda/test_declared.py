"""A lane that is a thread runs models that declare their inputs, and waits for nothing itself."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.kit import gallery
from serve.interface import DTYPES
from serve.ipc.messages import Part, RunTask, TaskDone, TaskError, TensorRef
from serve.lane.cuda.placed_model import PlacedModel
from serve.lane.cuda.queues import HostQueue
from serve.lane.place import Replaying
from serve.models.repository import find
from serve.server.declared_inputs import output_bytes, output_refs
from serve.server.staging import Staged, plan_layout
from tests.lane.cuda.test_recurring_runs import POOL_BYTES, Rig

#: Three kinds of edges; two outputs, of nodes and of edges; pooled, by a number read off a batch.
MODELS = "to_hetero", "attention", "molecules"
#: What copies a value from a device to the host, or would.
WAITS = {
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten._unique2.default,
}
_WIRE = {name: wire for wire, name in DTYPES.items()}


class Counting(TorchDispatchMode):
    """Counts what waits for the device."""

    def __init__(self):
        super().__init__()
        self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.waits += func in WAITS
        return func(*args, **(kwargs or {}))


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
    found.place._queue = Device()
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
    assert (own.waits > 0) == (name == "molecules")
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


def test_no_run_of_it_is_captured(rig, models):
    root, _ = models
    model, site = rig.place.load_to_measure(find(root, "attention"), "eager")
    found = rig.place.replaying(model, rig.signature_of(find(root, "attention")), site, None)
    assert found == Replaying()
