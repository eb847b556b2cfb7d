"""Who makes way for the server's own threads: lanes that compute, and not those that launch."""

import os
import signal

import pytest
import torch

from serve.ipc.setup import DevicePlace, LaneSetup
from serve.lane import loop as lane


class NoFile:
    def detach(self):
        return os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize(
    ("place", "made_nice"),
    [(None, True), (DevicePlace("cpu"), True), (DevicePlace("cuda:0"), False)],
)
def test_lanes_that_compute_are_nice_and_lanes_of_a_gpu_are_not(monkeypatch, place, made_nice):
    asked = []
    monkeypatch.setattr(os, "nice", asked.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name in ("_die_with_parent", "_release_fork_server"):
        monkeypatch.setattr(lane, name, lambda: None)
    monkeypatch.setattr(lane, "map_pool", lambda *_: None)
    lane.enter(LaneSetup("lane", (), 1, 0, 0, 30, 0, place=place), NoFile())
    assert bool(asked) == made_nice
