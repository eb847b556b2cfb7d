"""Where a request goes: it fits there, in the order of the rule."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.cluster.forward import passed_on
from serve.core.cluster.promise import pace_of, promised_ns
from serve.core.cluster.route import RULES, choose
from serve.core.cluster.views import MachineFacts, MachineView, RoutedRequest
from serve.errors import ConfigError

MS = 1_000_000


def view(name="a", count=0, **facts):
    found = MachineView(MachineFacts(name, **facts))
    found.told(count, count * 5 * MS)
    return found


def request(request_id=1, **fields):
    known = {"model": "gcn", "solo_ns": 6 * MS, "run_ns": 5 * MS, "due_ns": 12 * MS}
    return RoutedRequest(request_id, **{**known, **fields})


def chosen(views, rule="in_time", **fields):
    found = choose(request(**fields), views, 0, RULES[rule])
    return found and found.facts.name


def test_it_goes_where_its_model_and_its_memory_are():
    views = [
        view("small", budget_bytes=99),
        view("other", budget_bytes=500, models=frozenset({"gat"})),
        view("right", count=50, budget_bytes=100, models=frozenset({"gcn", "gat"})),
    ]
    assert chosen(views, need_bytes=100) == "right"
    assert chosen(views, need_bytes=101) is None
    assert chosen(views, model="sage", need_bytes=100) is None
    assert chosen([view("unknown", models=None)], need_bytes=1 << 60) == "unknown"
    assert chosen([]) is None


def test_each_rule_orders_by_its_own():
    views = [
        view("few", count=1, cores=1),
        view("wide", count=2, cores=8),
        view("fast", count=3, cores=2, pace=4.0),
    ]
    assert chosen(views, "count") == "few"
    assert chosen(views, "load") == "wide"
    assert chosen(views, "work") == "wide"
    # Two beside it on eight cores are none; on the fast one it shares two cores with three.
    assert chosen(views, "end") == "fast"


def test_in_time_comes_before_least_loaded():
    slow, busy = view("slow", pace=0.25, cores=8), view("busy", count=3, cores=2)
    # 1 ms of host and 5 of run: 21 ms on the slow one, 11 and a doubt of 1 on the busy one.
    assert chosen([slow, busy], due_ns=12 * MS) == "busy"
    assert chosen([slow, busy], due_ns=12 * MS - 1) == "slow"
    assert chosen([slow, busy], due_ns=None) == "slow"
    assert slow.ends_ns(request(), 0) == 21 * MS
    assert busy.ends_ns(request(), 100) == 100 + 11 * MS


def test_random_goes_by_weight_and_ties_are_spread():
    views = [view("one", cores=1), view("three", cores=3)]
    picks = Counter(choose(request(n), views, 0, RULES["random"]).facts.name for n in range(20_000))
    assert picks["three"] / 20_000 == pytest.approx(0.75, abs=0.015)
    alike = [view(str(n)) for n in range(4)]
    ties = Counter(choose(request(n), alike, 0).facts.name for n in range(8000))
    assert all(1800 < ties[one.facts.name] < 2200 for one in alike)


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    request_id=st.integers(0, 1 << 40),
    choices=st.integers(1, 4),
    able=st.sets(st.integers(0, 29)),
)
def test_of_two_choices_it_takes_one_that_can_if_there_is_one(counts, request_id, choices, able):
    views = [
        view(str(n), count, models=frozenset({"gcn"} if n in able else ()))
        for n, count in enumerate(counts)
    ]
    asked = request(request_id)
    found = choose(asked, views, 0, RULES["count"], choices=choices)
    can = [one for one in views if one.facts.can_hold(asked)]
    assert (found is None) == (not can)
    assert found is None or found in can
    assert found is choose(asked, views, 0, RULES["count"], choices=choices)
    if found is not None:
        assert choose(asked, views, 0, choices=choices, avoid=can) is None


def test_two_choices_look_at_two():
    views = [view(str(n), count=n) for n in range(100)]
    best = [choose(request(n), views, 0, RULES["count"], choices=2).count for n in range(4000)]
    # The lesser of two of 0 … 99.
    assert sum(best) / len(best) == pytest.approx(32.8, abs=1.5)


def test_a_machine_passes_on_what_it_cannot_do_in_time_and_only_once():
    asked, here = request(), view("here", count=9, cores=2)
    free, full = view("free", cores=2), view("full", count=9, cores=2)
    assert passed_on(asked, here, [full, free], 0, hops=0) is free
    assert passed_on(asked, here, [full, free], 0, hops=1) is None
    assert passed_on(asked, here, [full], 0, hops=0) is None
    assert passed_on(asked, free, [full], 0, hops=0) is None
    # The way there takes what is left of its time.
    assert passed_on(asked, here, [free], 0, hops=0, hop_ns=6 * MS) is None
    assert passed_on(replace(asked, due_ns=None), here, [free], 0, hops=0) is None


def test_a_machine_passes_on_what_it_cannot_hold_even_if_late():
    here = view("here", models=frozenset({"gat"}))
    there = view("there", count=99, models=frozenset({"gcn"}))
    assert passed_on(request(), here, [there], 0, hops=0) is there
    assert passed_on(request(), here, [here], 0, hops=0) is None
    small = view("small", budget_bytes=9)
    assert passed_on(request(need_bytes=10), small, [there], 0, hops=0) is there


def test_the_promise_follows_from_the_reference_pool():
    assert promised_ns(6 * MS, 2.0) == 12 * MS
    here = {"gcn 100": 4.0, "gat 100": 10.0, "only here": 1.0}
    assert pace_of(here, {"gcn 100": 8.0, "gat 100": 5.0}) == pytest.approx(1.0)
    assert pace_of(here, {"gcn 100": 8.0}) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="no run is calibrated on both pools"):
        pace_of(here, {"sage": 1.0})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MachineFacts("a", cores=0), "cores 0"),
        (lambda: MachineFacts("a", pace=0.0), "pace 0"),
        (lambda: request(solo_ns=1, run_ns=2), "run 2"),
        (lambda: request(need_bytes=-1), "memory -1"),
    ],
)
def test_impossible_facts_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
