"""The loop of a lane, over the socket by which the server talks to it."""

import socket
from types import SimpleNamespace

import pytest

from serve.ipc.messages import RunTask, UnloadModel, encode
from serve.lane.channel import LaneChannel
from serve.lane.loop import Lane


@pytest.mark.parametrize("after_start", [False, True])
def test_a_lane_ends_without_an_error_when_its_server_has_gone(after_start):
    server, lane = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = SimpleNamespace(meter=None, wait=lambda: None, unload=lambda key: server.close())
    with server, lane:
        server.send(encode(UnloadModel("gcn:1")))
        server.send(encode(RunTask(1, "gcn:1", (), 0)))
        if not after_start:
            server.close()
        Lane(LaneChannel(lane), place).serve()
