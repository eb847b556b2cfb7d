"""Requests for models that declare their inputs: several as one run, and what the engine tells."""

import json
import shutil

import numpy as np
import pytest
from msgspec.structs import replace

from bench.kit import gallery
from bench.kit.processes import PATIENCE_S
from serve.commands.configured import calibration_cache, device_of
from serve.config import load_config
from serve.errors import InvalidInput, Mismatch
from serve.estimate.estimator import ModelEstimator
from serve.server.engine import Engine
from serve.server.learning.alone import call_of
from tests.server.test_engine import CONFIG
from tests.server.test_repeats import GRAPH_SECTION
from tests.server.together import all_at_once

#: Authors, papers and three kinds of edges.
UNEVEN = ((12, 3, 30, 9, 21), (4, 40, 8, 90, 17), (7, 8, 5, 6, 4))
MODELS = ("molecules", "attention", "to_hetero")


@pytest.fixture(scope="module")
def models(trouble):
    yield {name: gallery.write(trouble.root, name) for name in MODELS}
    for name in MODELS:
        shutil.rmtree(trouble.root / name)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, trouble, models):
    folder = tmp_path_factory.mktemp("declared")
    x = np.zeros((9, 16), np.float32)
    np.savez(folder / "own.npz", num_nodes=9, edge_index=np.zeros((2, 3), np.int64), x=x)
    path = folder / "server.toml"
    path.write_text(CONFIG.format(repository=trouble.root) + GRAPH_SECTION)
    config = load_config(path)
    device = device_of(config)
    found = Engine(config, device, lambda record: None, calibration_cache(config, device))
    found.start()
    found.open()
    found.wait_loaded()
    yield found
    found.stop()


def patient(name, arrays):
    """Return a request that is never late, so that on a busy machine too it may join others."""
    return replace(call_of(name, arrays), qos_target_ns=int(PATIENCE_S * 1e9))


@pytest.mark.parametrize("name", ["molecules", "attention", "to_hetero"])
def test_waiting_requests_run_as_one(engine, trouble, models, monkeypatch, name):
    union = ModelEstimator.union
    monkeypatch.setattr(ModelEstimator, "union", lambda *a: replace(union(*a), run_ns=1))
    requests = [
        gallery.request(models[name], counts, seed)
        for seed, counts in enumerate(
            UNEVEN if name == "to_hetero" else ((12, 30), (40, 90), (7, 8))
        )
    ]
    if name == "molecules":
        del requests[1]["batch"]
    given = all_at_once(engine, trouble, [patient(name, arrays) for arrays in requests])
    assert [answer.record.merged for answer in given] == [3, 3, 3]
    for answer, arrays in zip(given, requests, strict=True):
        expected = gallery.expected(models[name], arrays)
        assert answer.outputs.keys() == expected.keys()
        for output, wanted in expected.items():
            scale = 1e-4 * float(np.abs(wanted).max())
            np.testing.assert_allclose(answer.outputs[output], wanted, rtol=0, atol=scale)


def test_an_estimate_of_totals_is_that_of_equal_shares(engine):
    found = engine.estimate("to_hetero", "", 400, 1200)
    entry = engine._catalogue.get("to_hetero")
    # Times are corrected by every run.
    assert found.peak_bytes == entry.estimator.estimate(200, 200, 400, 400, 400).peak_bytes


def test_the_record_of_a_request_has_its_totals(engine, models):
    arrays = gallery.request(models["to_hetero"], (5, 6, 7, 8, 9), seed=1)
    record = engine.submit(call_of("to_hetero", arrays)).result().record
    assert (record.num_nodes, record.num_edges) == (11, 24)


def test_the_description_holds_the_declaration(engine):
    info = engine.model("to_hetero")
    assert info.rows is None
    declared = json.loads(info.properties["interface"])
    assert [one["name"] for one in declared["outputs"]] == ["author", "paper"]
    assert [spec.shape for spec in info.outputs] == [(-1, 4), (-1, 4)]


def test_a_graph_with_one_type_is_taken_by_its_plain_names(engine, models):
    """Outputs with rows for nodes are told, of the ids alone; those of edges are not."""
    ids = {"node_ids": np.array([4, 0, 4])}
    result = engine.submit(replace(call_of("attention", ids), graph="own")).result()
    graph = {"x": np.zeros((9, 16), np.float32), "edge_index": np.zeros((2, 3), np.int64)}
    wanted = gallery.expected(models["attention"], graph)["y"][[4, 0, 4]]
    assert list(result.outputs) == ["y"]
    np.testing.assert_allclose(result.output, wanted, rtol=0, atol=1e-5)
    with pytest.raises(InvalidInput, match="'attention' has no row for each id"):
        engine.submit(replace(call_of("attention", ids), graph="own", wanted=("attention",)))


def test_a_graph_that_lacks_an_input_is_refused_by_name(engine):
    ids = {"node_ids": np.zeros(1, np.int64)}
    with pytest.raises(Mismatch, match=r"'molecules' takes 'x'; .* has float32 .* not int64"):
        engine.submit(replace(call_of("molecules", ids), graph="own"))


def test_shapes_that_disagree_are_refused(engine, models):
    arrays = gallery.request(models["molecules"], (5, 6), seed=1)
    arrays["edge_attr"] = arrays["edge_attr"][:3]
    with pytest.raises(InvalidInput, match="'edge_attr': 3 E, but 'edge_index' has 6 E"):
        engine.submit(call_of("molecules", arrays))
