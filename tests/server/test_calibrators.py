"""Processes that measure models beside serving lanes."""

import os
import signal

import pytest

from bench.kit.processes import PATIENCE_S, wait_for
from serve.ipc.messages import LaneStarted, TaskDone
from serve.server.lanes.pool import LaneDown
from tests.e2e.mischief import HOLD
from tests.server.test_pool import LANES, Talk
from tests.server.test_yielding import stands_still


@pytest.fixture
def talk(cores):
    found = Talk(cores).start()
    yield found
    found.end()


def test_background_work_stands_still_while_a_lane_executes_on_its_core(talk, trouble, cores):
    """Lane 1 is on the last core, which is also lane 0's where there is no other."""
    talk.load(trouble, LANES[0])
    talk.load(trouble, LANES[1])
    with talk.pool.calibrator(background=True) as calibrator:
        pid = calibrator._process.pid
        assert isinstance(calibrator.receive(PATIENCE_S), LaneStarted)
        assert os.sched_getaffinity(pid) == {cores[1]}
        with talk.pool.calibrator():
            pass  # A model that is loaded meanwhile changes nothing.
        talk.run(0.0, LANES[0])
        assert stands_still(pid) == (cores[0] == cores[1])
        talk.hear(LANES[0], TaskDone)
        talk.pool.ended(LANES[0])
        with trouble.holding():
            talk.run(HOLD, LANES[1])
            wait_for(lambda: stands_still(pid), "it to stand still")
            talk.pool.suspend(LANES[1])
            wait_for(lambda: not stands_still(pid), "it to go on")
            talk.pool.resume(LANES[1])
            wait_for(lambda: stands_still(pid), "it to stand still")
        talk.hear(LANES[1], TaskDone)
        talk.pool.ended(LANES[1])
        wait_for(lambda: not stands_still(pid), "it to go on")
        # Nor does a lane that dies leave it so.
        with trouble.holding():
            talk.run(HOLD, LANES[1])
            wait_for(lambda: stands_still(pid), "it to stand still")
            os.kill(talk.pool.pids()[LANES[1]], signal.SIGKILL)
            talk.hear(LANES[1], LaneDown)
        wait_for(lambda: not stands_still(pid), "it to go on")


def test_lanes_that_are_pinned_to_none_serve_as_well(trouble):
    """As under a CPU quota; background work then stands still while any of them executes."""
    talk = Talk(None).start()
    try:
        for lane_id in LANES:
            assert os.sched_getaffinity(talk.pool.pids()[lane_id]) == os.sched_getaffinity(0)
            talk.load(trouble, lane_id)
        with talk.pool.calibrator(background=True) as calibrator:
            assert isinstance(calibrator.receive(PATIENCE_S), LaneStarted)
            with trouble.holding():
                for lane_id in LANES:
                    talk.run(HOLD, lane_id, task_id=7 + lane_id)
                wait_for(lambda: len(trouble.running()) == 2, "both runs")
                wait_for(lambda: stands_still(calibrator._process.pid), "it to stand still")
            for lane_id in LANES:
                talk.hear(lane_id, TaskDone)
                talk.pool.ended(lane_id)
            wait_for(lambda: not stands_still(calibrator._process.pid), "it to go on")
    finally:
        talk.end()
