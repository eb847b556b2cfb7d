"""The requests that are accepted and not ended."""

import threading
from types import SimpleNamespace

from serve.server import clock
from serve.server.accepted import AcceptedRequests
from serve.server.learning.alone import IDLE_NS


def ticket(number, arrived_ns):
    entry = SimpleNamespace(inflight=0, retired=False, idle=threading.Event())
    return SimpleNamespace(
        task=SimpleNamespace(task_id=number),
        call=SimpleNamespace(arrived_ns=arrived_ns),
        entry=entry,
        alone=None,
    )


def test_a_request_is_alone_after_a_pause_and_until_another_comes():
    accepted = AcceptedRequests()
    first, second = ticket(1, IDLE_NS), ticket(2, IDLE_NS)
    accepted.add(first)
    assert first.alone
    accepted.add(second)
    assert (first.alone, second.alone) == (False, False)
    for number in (1, 2):
        accepted.remove(number)
    soon, later = ticket(3, clock.now_ns()), ticket(4, clock.now_ns() + 10 * IDLE_NS)
    accepted.add(soon)
    assert not soon.alone
    accepted.remove(3)
    accepted.add(later)
    assert later.alone
    assert 4 in accepted
    assert accepted.tickets() == (later,)


def test_a_retired_version_is_idle_after_its_last_answer():
    accepted = AcceptedRequests()
    only = ticket(1, 0)
    accepted.add(only)
    only.entry.retired = True
    assert not only.entry.idle.is_set()
    accepted.answered(only)
    assert only.entry.idle.is_set()
