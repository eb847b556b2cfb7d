"""What bench/host/counted_server.py counts."""

import importlib

import pytest

from bench.host import counted_server


def test_what_a_part_takes_within_another_is_counted_once(monkeypatch):
    counts = counted_server._Counts()
    times = iter([0, 10, 25, 30, 37, 100])  # outer from 0 to 100, inner from 10 and from 30
    monkeypatch.setattr(counted_server, "_COUNTS", counts)
    monkeypatch.setattr(counted_server, "thread_time_ns", lambda: next(times))

    def fails():
        raise ValueError("within")

    inner, failing = (
        counted_server._counted("inner", lambda: 1),
        counted_server._counted("x", fails),
    )

    def both():
        with pytest.raises(ValueError, match="within"):
            failing()
        return inner()

    assert counted_server._counted("outer", both)() == 1
    assert counts.taken_ns == {"outer": 100 - 15 - 7, "x": 15, "inner": 7}
    assert counts.calls == {"outer": 1, "x": 1, "inner": 1}


@pytest.mark.parametrize("place", [p for places in counted_server.PARTS.values() for p in places])
def test_every_part_is_there(place):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)
