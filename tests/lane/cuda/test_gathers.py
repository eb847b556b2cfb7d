"""A run of several requests on a resident graph: what a lane gives its device, in which order."""

import numpy as np
import pytest
import torch

from serve.graphs.features import FeatureKeeper
from serve.ipc.messages import GatherRef, Part, RunTask, TaskDone, TensorRef
from serve.lane.cuda.queues import HostQueue
from serve.lane.task import PoolTensors
from serve.models import zoo
from serve.models.repository import find
from serve.models.writer import write_model
from tests.lane.cuda.test_recurring_runs import ARGS, CLASSES, FEATURES, Rig
from tests.lane.cuda.test_tables import table_of

ROWS, PARTS, THREADS = 30, 3, 1 << 15


@pytest.fixture
def rig(tmp_path):
    torch.manual_seed(0)
    write_model(tmp_path, "gcn", zoo.gcn(**ARGS), factory="serve.models.zoo:gcn", args=ARGS)
    found = Rig()
    found.load(find(tmp_path, "gcn"), gather_threads=THREADS)
    yield found
    found.close()


@pytest.fixture
def asked(monkeypatch):
    """What the queue was asked for."""
    found = []

    def watch(name):
        inner = getattr(HostQueue, name)

        def watched(*args, **named):
            by = f" by {named['threads']}" if name == "gather" else ""
            found.append(name + by)
            return inner(*args, **named)

        monkeypatch.setattr(HostQueue, name, watched)

    watch("upload")
    watch("gather")
    return found


class Places:
    """Arrays in a pool, one behind the other."""

    def __init__(self, pool):
        self.pool, self.end = pool, 0

    def put(self, name, value):
        start, self.end = self.end, self.end + -(-value.nbytes // 64) * 64
        self.pool[start : start + value.nbytes] = value.tobytes()
        return TensorRef(name, value.dtype.name, value.shape, start)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_all_parts_are_uploaded_before_any_is_gathered(tmp_path, rig, asked, dtype):
    """What goes up later may take the place of rows that were let go, but not yet read."""
    keeper = FeatureKeeper(dtype=dtype.replace("uint8", "float32"), folder=tmp_path, shared=True)
    x = np.arange(ROWS * FEATURES, dtype=np.float32).reshape(ROWS, FEATURES)
    table = keeper.kept(x if dtype == "uint8" else x + 0.5, "test")
    assert table.dtype == dtype
    places, parts, expected = Places(rig.pool), [], []
    for number in range(PARTS):
        ids = rig.rng.integers(0, ROWS, 20 + number)
        edges = rig.rng.integers(0, len(ids), (2, 60))
        at, new = np.array([3, 7]), rig.rng.random((2, FEATURES), np.float32)
        refs = [places.put(*named) for named in (("ids", ids), ("at", at), ("new", new))]
        size_bytes = 4 * len(ids) * CLASSES
        output = places.put("output", np.zeros((len(ids), CLASSES), np.float32))
        edge_index = places.put("edge_index", edges)
        gather = GatherRef(table_of(table), *refs)
        parts.append(Part((edge_index,), output.offset_bytes, size_bytes, gather))
        features = table[ids].astype(np.float32)
        features[at] = new
        inputs = {"x": torch.from_numpy(features), "edge_index": torch.from_numpy(edges)}
        expected.append((output, rig.reference.run(inputs)))
    asked.clear()
    answer = rig.place.run(RunTask(5, "m", tuple(parts), 1 << 30), rig.lane._models["m"])
    assert isinstance(answer, TaskDone), answer
    assert asked == ["upload"] * PARTS + [f"gather by {THREADS}"] * PARTS
    for output, wanted in expected:
        torch.testing.assert_close(PoolTensors(rig.pool).of(output), wanted, rtol=1e-4, atol=1e-5)
