"""How many servers are wanted, for load that stands, grows, falls and overflows."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.cluster.scaling import (
    DOWN_AFTER_NS,
    MOST_LOAD,
    WINDOW_NS,
    Scaler,
    ServerCounts,
    most_load,
    servers_for,
)

S = 1_000_000_000


class Pool:
    """Servers that share a load evenly, each as busy as it can be, and a scaler that adds some."""

    def __init__(self, least=1, most=20, count=1, start_s=20, cores=2, step_s=1):
        self.scaler = Scaler(least, most, count, start_ns=start_s * S, now_ns=0)
        self.start_s, self.cores, self.step_s = start_s, cores, step_s
        self.second = 0
        self.ready = count
        self._counts = {}
        self._starting = []

    def run(self, load, steps, late=0.0):
        """Offer a load in servers for some steps; returns how many were wanted after each."""
        wanted = []
        for _ in range(steps):
            self.second += self.step_s
            self._starting = [at for at in self._starting if at > self.second]
            self.ready = self.scaler.count - len(self._starting)
            busy = min(load / self.ready, 1.0)
            for server in range(self.ready):
                before = self._counts.get(server, ServerCounts(cores=self.cores))
                self._counts[server] = ServerCounts(
                    before.ended + 100,
                    before.crowded + int(100 * late),
                    before.run_ns + int(busy * self.cores * self.step_s * S),
                    self.cores,
                )
                self.scaler.told(str(server), self._counts[server], self.second * S)
            before = self.scaler.count
            wanted.append(self.scaler.decide(self.ready, self.second * S))
            self._starting += [self.second + self.start_s] * (wanted[-1] - before)
        return wanted


def test_a_load_that_stands_gets_what_carries_it_and_no_more():
    pool = Pool()
    wanted = pool.run(0.4, 1500)
    assert set(wanted) == {1}
    pool = Pool(count=8)
    wanted = pool.run(3.0, 1500)
    need = servers_for(3.0, 20)
    # What was there at first stays until fewer have been enough for long.
    assert set(wanted[: DOWN_AFTER_NS // S - 1]) == {8}
    assert set(wanted[DOWN_AFTER_NS // S :]) == {need}


def test_servers_are_added_as_load_comes():
    pool = Pool()
    pool.run(0.3, 60)
    wanted = pool.run(3.0, 300)
    assert wanted[-1] >= servers_for(3.0, 20)
    assert wanted == sorted(wanted)
    # Each step is seen in a window, and then it waits for a start.
    assert wanted[4 * (WINDOW_NS // S + 20)] >= servers_for(3.0, 20)


def test_a_load_that_grows_is_foreseen():
    pool = Pool(count=2, start_s=60)
    pool.run(0.5, 60)
    first = {}
    for step in range(300):
        load = 0.5 + step * 0.01
        (wanted,) = pool.run(load, 1)
        first.setdefault(wanted, load)
    for count, load in first.items():
        if count > 2:
            assert load < (count - 1) * most_load(count - 1) * 0.8


def test_answers_that_are_late_for_want_of_servers_add_one_after_the_other():
    pool = Pool(most=4)
    wanted = pool.run(0.2, 200, late=0.1)
    assert wanted[-1] == 4
    assert wanted == sorted(wanted)
    steps = [at for at, (a, b) in enumerate(pairwise(wanted)) if a != b]
    # The one before serves first.
    assert all(later - sooner >= 20 for sooner, later in pairwise(steps))
    assert set(Pool(most=4).run(0.2, 200, late=0.0)) == {1}


def test_a_day_takes_few_more_server_hours_than_foresight_would():
    pool, taken, least = Pool(count=2, step_s=10), 0, 0
    for minute in range(24 * 60):
        load = 4.0 - 3.5 * math.cos(2 * math.pi * minute / (24 * 60))
        taken += sum(pool.run(load, 6))
        least += 6 * servers_for(load, 20)
        # At most 1 % would be late, by the simulated table.
        assert load <= pool.ready * most_load(pool.ready)
    assert taken <= 1.15 * least


def test_the_table_is_met_and_grows_with_the_pool():
    assert [most_load(size) for size, _ in MOST_LOAD] == [load for _, load in MOST_LOAD]
    loads = [most_load(size) for size in range(1, 40)]
    assert loads == sorted(loads)
    assert most_load(1000) == MOST_LOAD[-1][1]


def test_bounds_that_are_none_are_refused():
    for bounds in ((0, 1), (3, 2)):
        with pytest.raises(ValueError, match="1 <= least"):
            Scaler(*bounds, 1, start_ns=S, now_ns=0)


@given(
    loads=st.lists(st.tuples(st.floats(0, 12), st.integers(1, 80)), min_size=1, max_size=8),
    bounds=st.tuples(st.integers(1, 8), st.integers(0, 8)),
    late=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_it_stays_in_its_bounds_and_takes_none_away_that_was_needed_lately(loads, bounds, late):
    least, most = bounds[0], bounds[0] + bounds[1]
    pool, wanted = Pool(least, most, count=least, step_s=10), [least]
    for load, steps in loads:
        wanted += pool.run(load, steps, late)
    assert all(least <= count <= most for count in wanted)
    for at, (before, after) in enumerate(pairwise(wanted)):
        if after > before:
            assert min(wanted[at + 1 : at + DOWN_AFTER_NS // (10 * S)]) >= after


@given(load=st.floats(0, 100), more=st.floats(0, 100))
def test_more_load_never_needs_fewer(load, more):
    assert servers_for(load, 50) <= servers_for(load + more, 50)
