"""Outputs and weights with NaN or infinity: counted, refused or let pass, and told."""

import shutil

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from serve.commands.configured import calibration_cache, device_of
from serve.config import load_config
from serve.errors import ModelError
from serve.estimate.estimator import ModelEstimator
from serve.models.model_config import CONFIG_FILE
from serve.models.writer import write_model
from serve.obs.metrics import Metrics
from serve.rpc.convert import qos_facts
from serve.server.engine import Engine
from tests.e2e.support import Graph
from tests.processes import PATIENCE_S
from tests.rpc.fakes import FACTS
from tests.server import divide
from tests.server.test_engine import CONFIG, call
from tests.server.together import ended_together

HALVES = """
[[model.input]]
name = "x"
dtype = "FP32"
shape = ["N", 4]
low = 1.0
high = 2.0
[[model.input]]
name = "edge_index"
dtype = "INT64"
shape = [2, "E"]
index = "N"
[[model.output]]
name = "whole"
dtype = "FP32"
shape = ["N", 2]
[[model.output]]
name = "half"
dtype = "FP16"
shape = ["N"]
"""


@pytest.fixture(scope="module")
def models(trouble):
    torch.manual_seed(0)
    made = {
        "counted": ("build", "", ""),
        "finite": ("build", "", "finite"),
        "unchecked": ("build", "", "off"),
        "halves": ("build_halves", HALVES, ""),
        "broken": ("build", "", ""),
    }
    for name, (factory, declaration, check) in made.items():
        module = getattr(divide, factory)()
        if name == "broken":
            module.linear.bias.data[1] = float("nan")
        folder = write_model(
            trouble.root, name, module,
            factory=f"./model.py:{factory}", args={}, declaration=declaration,
        )  # fmt: skip
        shutil.copy(divide.__file__, folder / "model.py")
        if check:
            config = folder / CONFIG_FILE
            text = config.read_text().replace("[model]\n", f'[model]\ncheck_output = "{check}"\n')
            config.write_text(text)
    yield made
    for name in made:
        shutil.rmtree(trouble.root / name)


@pytest.fixture(scope="module")
def records():
    return []


@pytest.fixture(scope="module")
def logged():
    return []


@pytest.fixture(scope="module")
def engine(tmp_path_factory, trouble, models, records):
    path = tmp_path_factory.mktemp("nonfinite") / "server.toml"
    path.write_text(CONFIG.format(repository=trouble.root))
    config = load_config(path)
    device = device_of(config)
    found = Engine(config, device, records.append, calibration_cache(config, device))
    found.start()
    found.open()
    found.wait_loaded()
    yield found
    found.stop()


def graph(bad=(), nodes=5):
    """Return a graph whose nodes in `bad` are divided by 0."""
    x = np.ones((nodes, 4), np.float32)
    x[list(bad), 0] = 0.0
    return Graph(x, np.zeros((2, 1), np.int64))


def test_such_answers_are_counted(engine, records):
    records.clear()
    good = engine.submit(call(graph(), "counted")).result()
    bad = engine.submit(call(graph((1, 3)), "counted")).result()
    assert (good.record.nonfinite_values, bad.record.nonfinite_values) == (0, 4)
    assert not np.isfinite(bad.output[[1, 3]]).any()
    assert "nonfinite_values" not in qos_facts(good.record)
    assert qos_facts(bad.record)["nonfinite_values"] == 4
    metrics = Metrics(FACTS, lambda: engine.snapshot())
    for record in records:
        metrics.observe(record)
    assert b'gnnserve_nonfinite_answers_total{model="counted"} 1.0' in metrics.text()


def test_a_model_may_forbid_them(engine):
    assert np.isfinite(engine.submit(call(graph(), "finite")).result().output).all()
    with pytest.raises(ModelError) as caught:
        engine.submit(call(graph((2,)), "finite")).result()
    assert str(caught.value).startswith("output 'output' [2, 0] is ")
    assert str(caught.value).endswith("; 2 of 10 values are not finite (model.check_output)")


def test_a_model_may_leave_the_check_out(engine):
    answer = engine.submit(call(graph((2,)), "unchecked")).result()
    assert not np.isfinite(answer.output).all()
    assert answer.record.nonfinite_values == 0


def test_declared_outputs_of_any_precision_are_checked(engine):
    answer = engine.submit(call(graph((0, 4)), "halves")).result()
    assert answer.record.nonfinite_values == 4 + 2
    # Finite, but their sum is not.
    large = graph(nodes=40)
    large.x[:, 0] = 1e-4
    answer = engine.submit(call(large, "halves")).result()
    expected = sum(np.count_nonzero(~np.isfinite(one)) for one in answer.outputs.values())
    assert answer.record.nonfinite_values == expected


@pytest.mark.parametrize("name", ["counted", "finite"])
def test_of_merged_requests_only_those_concerned_are_told(engine, trouble, monkeypatch, name):
    union = ModelEstimator.union
    monkeypatch.setattr(ModelEstimator, "union", lambda *a: replace(union(*a), run_ns=1))
    made = [
        replace(call(one, name), qos_target_ns=int(PATIENCE_S * 1e9))
        for one in (graph(), graph((1,)), graph(nodes=3))
    ]
    ended = ended_together(engine, trouble, made)
    found = [one.exception() or one.result().record for one in ended]
    good, bad, other = found
    assert (good.nonfinite_values, other.nonfinite_values) == (0, 0)
    if name == "counted":
        assert [good.merged, bad.merged, other.merged] == [3, 3, 3]
        assert bad.nonfinite_values == 2
    else:
        assert isinstance(bad, ModelError)


def test_weights_that_are_no_numbers_are_noticed(engine, trouble, caplog):
    assert engine.model("broken").properties["nonfinite_weights"] == "linear.bias"
    assert "nonfinite_weights" not in engine.model("counted").properties
    weights = trouble.root / "broken" / "1" / "weights.safetensors"
    (trouble.root / "broken" / "2").mkdir()
    shutil.copy(weights, trouble.root / "broken" / "2")
    with caplog.at_level("WARNING"):
        engine.load("broken")
    assert "model broken:2: weights hold NaN or infinity: linear.bias" in caplog.text
