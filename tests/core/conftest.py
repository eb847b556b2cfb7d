"""The core is pure: here its code cannot reach a clock, sleep or open a socket."""

import socket
import sys
import time

import pytest


def _forbidden_to_core(name, real):
    def guarded(*args, **kwargs):
        if sys._getframe(1).f_globals.get("__name__", "").startswith("serve."):
            raise AssertionError(f"serve.core called {name}: take what it gives as an argument")
        return real(*args, **kwargs)

    return guarded


@pytest.fixture(autouse=True, scope="module")
def no_outside_world():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "sleep"):
            patch.setattr(time, name, _forbidden_to_core(f"time.{name}", getattr(time, name)))
        patch.setattr(socket, "socket", _forbidden_to_core("socket.socket", socket.socket))
        yield
