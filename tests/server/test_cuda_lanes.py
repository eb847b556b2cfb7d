"""Lanes that are threads of one process: the same packets, and one fate.

On the processor in place of a GPU: all but the streams and the memory is as it is there.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bench.kit import gallery
from serve.commands.configured import calibration_cache, device_of
from serve.config import load_config
from serve.core.types import LaneId
from serve.errors import ModelError
from serve.estimate.calibration import Calibration
from serve.estimate.estimator import ModelEstimator
from serve.ipc.messages import (
    LoadModel,
    ModelFailed,
    ModelLoaded,
    ModelProbed,
    ProbeModel,
    TaskDone,
    TaskError,
    UnloadModel,
)
from serve.ipc.setup import DevicePlace
from serve.models.repository import find
from serve.server.engine import Engine
from serve.server.lanes.listener import LaneDown, LaneUp
from serve.server.learning.alone import call_of
from serve.server.learning.beside import is_news
from tests.e2e.mischief import RAISE
from tests.processes import PATIENCE_S, is_running, wait_for
from tests.server.test_engine import CONFIG, call
from tests.server.test_pool import COLUMNS, LANES, NODES, OUTPUT_OFFSET, Talk

#: Several types of nodes and edges; pooled by a batch.
DECLARED = "to_hetero", "molecules"


@pytest.fixture(scope="module")
def talk():
    found = Talk(None, (DevicePlace("cpu"),)).start()
    yield found
    found.end()


def test_lanes_share_a_process(talk):
    pids = talk.pool.pids()
    assert pids.keys() == set(LANES)
    assert len(set(pids.values())) == 1
    assert os.getpid() not in pids.values()


def test_each_lane_answers_with_the_one_model(talk, trouble):
    weights = trouble.module.state_dict()
    for lane_id in LANES:
        talk.load(trouble, lane_id)
        x = talk.run(0.5, lane_id)
        done = talk.hear(lane_id, TaskDone)
        assert (done.task_id, done.rows, done.columns) == (7, (NODES,), COLUMNS)
        assert done.run_ns > 0
        assert done.peak_bytes is None
        found = talk.shared.array(OUTPUT_OFFSET, "float32", (NODES, COLUMNS))
        expected = x @ weights["linear.weight"].numpy().T + weights["linear.bias"].numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_a_model_raises_is_one_tasks_end(talk, trouble):
    for lane_id in LANES:
        talk.load(trouble, lane_id)
    talk.run(RAISE, LANES[0])
    assert talk.hear(LANES[0], TaskError).reason == "model_error"
    for lane_id in LANES:
        talk.run(0.5, lane_id)
        talk.hear(lane_id, TaskDone)


def test_a_model_lives_until_the_last_lane_lets_go(talk, trouble):
    for lane_id in LANES:
        talk.load(trouble, lane_id)
    talk.pool.send(LANES[0], UnloadModel("m"))
    talk.run(0.5, LANES[0])
    assert "model m is not loaded on this lane" in talk.hear(LANES[0], TaskError).message
    talk.run(0.5, LANES[1])
    talk.hear(LANES[1], TaskDone)
    talk.pool.send(LANES[1], UnloadModel("m"))
    talk.run(0.5, LANES[1])
    talk.hear(LANES[1], TaskError)
    talk.load(trouble, LANES[1])


def test_a_model_that_does_not_load_is_told_by_every_lane(talk, trouble):
    for lane_id in LANES:
        assert "shapes" in talk.load_wrong(trouble, lane_id).message


def test_calibration_runs_where_lanes_run_and_they_take_the_executor_it_chose(talk, trouble):
    spec = find(trouble.root, "gcn")
    with talk.pool.calibrator() as calibrator:
        calibrator.send(ProbeModel(spec, 0.2, 64 << 20, "csr"))
        while not isinstance(said := calibrator.receive(PATIENCE_S), ModelProbed):
            assert not isinstance(said, ModelFailed), said
    calibration = msgspec.msgpack.decode(said.calibration, type=Calibration)
    assert calibration.executor == "csr"
    for lane_id in LANES:
        talk.pool.send(lane_id, LoadModel("g", spec, said.signature, calibration.executor))
        assert talk.hear(lane_id, ModelLoaded) == ModelLoaded("g")
        talk.pool.send(lane_id, UnloadModel("g"))


def test_a_process_that_dies_is_all_its_lanes_and_comes_back(talk):
    pid = talk.pool.pids()[LANES[0]]
    os.kill(pid, signal.SIGKILL)
    assert talk.hear(LANES[0], LaneDown) == LaneDown(LANES)
    for lane_id in LANES:
        talk.hear(lane_id, LaneUp)
    assert talk.pool.restarts == 1
    assert len(set(talk.pool.pids().values())) == 1


def test_stopping_ends_the_process(trouble):
    talk = Talk(None, (DevicePlace("cpu"),)).start()
    pid = talk.pool.pids()[LaneId(0)]
    talk.end()
    wait_for(lambda: not is_running(pid), "the process to end")


def test_the_whole_engine_serves_on_thread_lanes(trouble, tmp_path):
    path = tmp_path / "server.toml"
    # Merged, only the first graph's word would be heard.
    text = CONFIG.format(repository=trouble.root) + "merge = false\n"
    path.write_text(text.replace("= 4", "= 64"))
    config = load_config(path)
    device = replace(
        device_of(config),
        lane_cores=((), ()),
        parallelism=2,
        can_suspend=False,
        places=(DevicePlace("cpu"),),
    )
    records: list[object] = []
    engine = Engine(config, device, records.append, calibration_cache(config, device))
    try:
        engine.start()
        engine.open()
        # Learned from the server's own requests, and told to the scheduler.
        known = engine.driver.scheduler.parts.board.slowdown
        assert len(known) == 2
        assert not is_news(engine._catalogue.slowdown.by_runs.table, known)

        def ask(number: int) -> None:
            if number % 5 == 0:
                with pytest.raises(ModelError, match="asked to fail"):
                    engine.submit(call(trouble.graph(RAISE))).result()
                return
            graph = trouble.graph(0.0, num_nodes=50 + number)
            found = engine.submit(call(graph)).result()
            np.testing.assert_allclose(found.output, trouble.expected(graph), rtol=1e-4, atol=1e-5)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, range(30)))
        assert len(records) == 30
        assert engine.snapshot().reserved_bytes == 0
        assert engine.snapshot().lanes_up == 2
    finally:
        engine.stop()


def test_models_that_declare_their_inputs_are_served_on_thread_lanes(tmp_path, monkeypatch):
    """Calibrated there, asked alone, and several as one run."""
    models = {name: gallery.write(tmp_path / "models", name) for name in DECLARED}
    path = tmp_path / "server.toml"
    path.write_text(CONFIG.format(repository=tmp_path / "models").replace("= 4", "= 64"))
    config = load_config(path)
    device = replace(
        device_of(config), lane_cores=((),), parallelism=1, can_suspend=False,
        places=(DevicePlace("cpu", replay_bytes=1),),
    )  # fmt: skip
    union = ModelEstimator.union
    monkeypatch.setattr(
        ModelEstimator, "union", lambda *a: msgspec.structs.replace(union(*a), run_ns=1)
    )
    records: list[object] = []
    engine = Engine(config, device, records.append, calibration_cache(config, device))
    try:
        engine.start()
        engine.open()

        def ask(number: int) -> int:
            name = DECLARED[number % 2]
            counts = (20 + number, 30, 40, 50, 60)[: len(gallery.interface(models[name]).counts)]
            arrays = gallery.request(models[name], counts, seed=number)
            asked = msgspec.structs.replace(call_of(name, arrays), qos_target_ns=int(600e9))
            found = engine.submit(asked).result()
            expected = gallery.expected(models[name], arrays)
            assert found.outputs.keys() == expected.keys()
            for output, wanted in expected.items():
                scale = 1e-4 * float(np.abs(wanted).max())
                np.testing.assert_allclose(found.outputs[output], wanted, rtol=0, atol=scale)
            return int(found.record.merged)

        assert [ask(number) for number in range(2)] == [1, 1]
        with ThreadPoolExecutor(16) as threads:
            merged = list(threads.map(ask, range(48)))
        assert max(merged) > 1
        assert engine.snapshot().reserved_bytes == 0
        assert engine.snapshot().lane_restarts == 0
    finally:
        engine.stop()
