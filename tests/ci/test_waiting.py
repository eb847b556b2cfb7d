"""What tests wait with, and the ports they take."""

from pathlib import Path

import pytest

from bench.kit.servers import free_ports
from bench.kit.waiting import PATIENCE_S, eventually, wait_for, with_growing_limits


def test_the_first_truthy_result_counts():
    results = iter([None, 0, "", "here", "later"])
    assert wait_for(lambda: next(results), "something") == "here"


def test_what_never_comes_is_named():
    with pytest.raises(AssertionError, match="never came: the end of time"):
        wait_for(lambda: False, "the end of time", 0.01)


def test_a_condition_that_says_what_it_is(monkeypatch):
    monkeypatch.setattr(
        "bench.kit.waiting.wait_for", lambda true, what: seen.append((true(), what))
    )
    seen = []
    eventually(lambda: 1 < 2)
    assert seen == [(True, "eventually(lambda: 1 < 2)")]


def test_limits_grow_until_one_is_long_enough():
    tried = []

    def ask(limit_s):
        tried.append(limit_s)
        return limit_s > 1 and "there"

    assert with_growing_limits(ask) == "there"
    assert tried == pytest.approx([0.2, 0.4, 0.8, 1.6])
    with pytest.raises(AssertionError, match="not with a limit of 204"):
        with_growing_limits(lambda limit_s: limit_s > PATIENCE_S)


def test_no_connection_takes_a_port_before_its_server_does():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert not any(first <= port <= last for port in ports)
