"""When the gateway is taken for one that hangs."""

import threading

import pytest

from serve.rest.process import _WAITS, GatewayProcess


class Lifeline:
    """Gives a sign (b"."), the end (b"") or, for None, nothing until the time is over."""

    def __init__(self, signs):
        self._signs = iter(signs)

    def settimeout(self, seconds):
        """Wait for no time at all."""

    def recv(self, _):
        sign = next(self._signs)
        if sign is None:
            raise TimeoutError
        return sign


@pytest.mark.parametrize(
    ("signs", "ended"),
    [
        # All processes stood still, and this one goes on first.
        ([b".", None, b".", b""], False),
        ([*([None] * (_WAITS - 1) + [b"."]) * 3, b""], False),
        ([b".", *[None] * _WAITS], True),
        ([None] * _WAITS, True),
    ],
)
def test_a_gateway_is_ended_for_silence_and_not_for_a_pause_of_all(monkeypatch, signs, ended):
    gateway = object.__new__(GatewayProcess)
    gateway._serves = threading.Event()
    killed = []
    monkeypatch.setattr(gateway, "_kill", lambda: killed.append(True))
    gateway._watch(Lifeline(signs))
    assert bool(killed) == ended
    assert gateway._serves.is_set() == (b"." in signs)
