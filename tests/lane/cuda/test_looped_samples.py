"""Samples of resident graphs are answered without Python, as Python would answer them."""

import numpy as np
import pytest
import torch

from serve.graphs.features import FeatureKeeper, memory_file
from serve.ipc.messages import (
    GatherRef,
    HotSetHeld,
    MapTable,
    Part,
    TableMapped,
    TaskDone,
)
from tests.lane.cuda.test_gathers import Places
from tests.lane.cuda.test_hot_rows import Offers
from tests.lane.cuda.test_packet_loop import Served, write_gcn
from tests.lane.cuda.test_recurring_runs import CLASSES, FEATURES
from tests.lane.cuda.test_tables import table_of
from tests.processes import wait_for

ROWS = 40


class Sampled(Served):
    """A lane that is asked for nodes of a resident graph."""

    def sample(self, features, num_ids=20, num_edges=60, *, patched=(), places=None, memory=None):
        """Put a sample into the pool; returns its part of a task, and what the model answers.

        `memory` is the table that is named in place of `features`.
        """
        places = places or Places(self.pool)
        ids = self.rng.integers(0, ROWS, num_ids)
        edges = self.rng.integers(0, num_ids, (2, num_edges))
        at = np.array(patched, np.int64)
        new = self.rng.random((len(at), FEATURES), np.float32)
        refs = [places.put(*named) for named in (("ids", ids), ("at", at), ("new", new))]
        edge_index = places.put("edge_index", edges)
        output = places.put("output", np.zeros((num_ids, CLASSES), np.float32))
        x = features[ids].astype(np.float32)
        x[at] = new
        inputs = {"x": torch.from_numpy(x), "edge_index": torch.from_numpy(edges)}
        gather = GatherRef(table_of(features if memory is None else memory), *refs)
        part = Part((edge_index,), output.offset_bytes, 4 * num_ids * CLASSES, gather)
        return part, self.reference.run(inputs).numpy()

    def map(self, features, hot=None):
        self.say(MapTable(table_of(features), hot))
        assert isinstance(self.hear(), TableMapped)


@pytest.fixture
def rig(tmp_path):
    found = Sampled()
    found.load(write_gcn(tmp_path), executor="csr", any_size=True)
    found.begin()
    yield found
    found.end()


def kept(folder, dtype, first=0.0):
    keeper = FeatureKeeper(dtype=dtype.replace("uint8", "float32"), folder=folder, shared=True)
    x = np.arange(ROWS * FEATURES, dtype=np.float32).reshape(ROWS, FEATURES) % 200
    found = keeper.kept(x + first + (0 if dtype == "uint8" else 0.5), "test")
    assert found.dtype == dtype
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_samples_are_gathered_and_answered_without_python(tmp_path, rig, dtype):
    features = kept(tmp_path, dtype)
    rig.map(features)
    rig.capture([rig.sample(features)])
    assert rig.looped() == 0
    rig.check([rig.sample(features, 17, 0)])
    rig.check([rig.sample(features, patched=(3, 7, 4))])
    places = Places(rig.pool)
    sizes = ((4, 9, ()), (12, 30, (0, 11)), (1, 0, ()))
    rig.check([rig.sample(features, n, e, patched=at, places=places) for n, e, at in sizes])
    assert rig.looped() == 3
    # Requests that bring their features use the same captures.
    rig.check([rig.part(20, 60)])
    assert rig.looped() == 4


def test_a_table_that_is_not_mapped_yet_is_pythons_to_map(tmp_path, rig):
    features = kept(tmp_path, "float32")
    rig.capture([rig.part(20, 60)])
    rig.check([rig.sample(features)])
    assert rig.looped() == 0
    rig.check([rig.sample(features)])
    assert rig.looped() == 1


def test_many_features_that_are_newer_than_the_table_are_pythons(tmp_path, rig):
    features = kept(tmp_path, "float32")
    rig.map(features)
    rig.capture([rig.sample(features, 80, 60)])
    rig.check([rig.sample(features, 80, 60, patched=range(65))])
    assert rig.looped() == 0
    rig.check([rig.sample(features, 80, 60, patched=range(64))])
    assert rig.looped() == 1


def test_a_graph_with_other_features_is_read_anew(tmp_path, rig):
    features = kept(tmp_path, "uint8")
    rig.map(features)
    rig.capture([rig.sample(features)])
    rig.check([rig.sample(features)])
    other = kept(tmp_path, "float32", 1.0)
    rig.map(other)
    # Nothing reads the old one any more, which is unmapped.
    assert list(rig.device.tables._tables) == [memory_file(other).number]
    rig.check([rig.sample(other)])
    assert rig.looped() == 2


def test_hot_rows_are_read_where_they_were_copied_to(tmp_path, rig):
    offers = Offers(tmp_path)
    features = kept(tmp_path, "float32")
    ref = table_of(features)
    hot = offers.hot(range(ROWS), ref)
    rig.say(MapTable(ref, hot))
    said = {type(rig.hear()), type(rig.hear())}
    assert said == {TableMapped, HotSetHeld}
    rig.capture([rig.sample(features)])
    # The copy is what is read: as if it held other values.
    copy = rig.device.hot._kept["g"].rows.rows
    copy.fill_(3.0)
    part, expected = rig.sample(np.full((ROWS, FEATURES), 3.0, np.float32), memory=features)
    rig.check([(part, expected)])
    assert rig.looped() == 1
    copy.copy_(torch.from_numpy(np.asarray(features)))
    rig.say(MapTable(ref, None))
    rig.hear()
    wait_for(lambda: rig.device.hot._kept["g"].rows is None, "the hot set's end")
    copy.fill_(3.0)
    rig.check([rig.sample(features)])
    assert rig.looped() == 2


def test_memory_for_more_ids_is_taken_with_a_larger_capture(tmp_path, rig):
    features = kept(tmp_path, "float32")
    rig.map(features)
    for count, times in ((20, 1), (100, 2), (10, 3)):
        rig.capture([rig.sample(features, count)])
        rig.check([rig.sample(features, count)])
        assert rig.looped() == times
    assert len(rig.place._recurring._scratch) == 128


def test_samples_are_pythons_where_no_memory_is_left_for_their_ids(tmp_path, rig, monkeypatch):
    def refused(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(rig.place._recurring.recorder, "keep", refused)
    features = kept(tmp_path, "float32")
    rig.map(features)
    rig.capture([rig.sample(features)])
    done = rig.run([rig.sample(features)[0]])
    assert isinstance(done, TaskDone)
    assert rig.looped() == 0
    rig.check([rig.part(20, 60)])
    assert rig.looped() == 1
