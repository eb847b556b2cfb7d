"""What a cluster knows of its servers, after each way in which they come, go and fall silent."""

import msgspec
import pytest

from serve.cluster.registry import SILENT_S, Announcement, Registry
from serve.errors import UnknownName

FIRST = Announcement("a:1", "a:2", 10, "a", ready=True)
SECOND = Announcement("b:1", "b:2", 10, "b", ready=True)


def registry(known=()):
    return Registry(forget_s=60, known=known, now_s=0)


def states(found):
    return {row.address: row.state for row in found.rows()}


def test_servers_join_as_they_get_ready_and_leave_as_they_end():
    found = registry()
    assert not found.announce(msgspec.structs.replace(FIRST, ready=False), 0)
    assert states(found) == {"a:1": "joining"}
    found.announce(FIRST, 1)
    found.announce(SECOND, 1)
    assert states(found) == {"a:1": "ready", "b:1": "ready"}
    found.left("a:1", 10)
    found.left("a:1", 10)
    assert found.servers() == (["b:1"], [])


def test_a_later_server_at_an_address_is_another_one():
    found = registry()
    found.announce(FIRST, 0)
    later = msgspec.structs.replace(FIRST, incarnation=11, fingerprint="new")
    found.announce(later, 1)
    found.announce(FIRST, 2)  # the earlier one's last words
    found.left("a:1", 10)
    (row,) = found.rows()
    assert (row.state, row.fingerprint) == ("ready", "new")


def test_a_machine_has_one_server_at_a_time():
    found = registry()
    found.announce(FIRST, 0)
    found.announce(SECOND, 0)
    found.announce(msgspec.structs.replace(FIRST, address="a:3", incarnation=11), 1)
    assert found.servers() == (["a:3", "b:1"], [])
    found.announce(FIRST, 2)  # the earlier one's last words
    assert found.servers() == (["a:3", "b:1"], [])


def test_a_silent_server_stays_for_the_front_to_judge_until_it_is_forgotten():
    found = registry()
    found.announce(FIRST, 0)
    found.look(SILENT_S + 1)
    assert states(found) == {"a:1": "suspect"}
    assert found.servers() == (["a:1"], [])
    found.announce(FIRST, SILENT_S + 2)
    assert states(found) == {"a:1": "ready"}
    found.look(70)
    assert found.servers() == ([], [])


def test_a_machine_is_drained_by_its_name_or_address_and_wanted_back():
    found = registry()
    found.announce(FIRST, 0)
    found.announce(SECOND, 0)
    assert found.drain("a") == ["a:1"]
    assert found.announce(FIRST, 1)
    assert not found.announce(SECOND, 1)
    assert found.servers() == (["a:1", "b:1"], ["a:1"])
    assert states(found) == {"a:1": "draining", "b:1": "ready"}
    assert found.drain("a:1", back=True) == ["a:1"]
    assert not found.announce(FIRST, 2)
    assert states(found) == {"a:1": "ready", "b:1": "ready"}
    with pytest.raises(UnknownName, match="machine 'c' is not in the cluster; known: a, b"):
        found.drain("c")


def test_a_server_started_anew_is_no_longer_drained():
    found = registry()
    found.announce(FIRST, 0)
    found.drain("a")
    assert not found.announce(msgspec.structs.replace(FIRST, incarnation=11), 1)
    assert found.servers() == (["a:1"], [])


def test_after_its_loss_it_knows_what_servers_say_and_forgets_none_meanwhile():
    lost = registry()
    lost.announce(FIRST, 0)
    lost.announce(SECOND, 0)
    lost.drain("a")
    found = registry(known=lost.known())
    assert found.rows() == lost.rows()
    assert found.servers() == (["a:1", "b:1"], ["a:1"])
    assert found.announce(FIRST, 1)
    assert states(found) == {"a:1": "draining", "b:1": "ready"}
    found.look(30)
    assert states(found) == {"a:1": "draining", "b:1": "suspect"}
    assert found.servers() == (["a:1", "b:1"], ["a:1"])
    found.look(100)
    assert found.servers() == ([], [])
