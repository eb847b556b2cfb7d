"""Profiles of a load's rate: the multiples they describe, and the arrivals that follow."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import ConfigError
from serve.profiles import parse_profile
from serve.workload import GraphRef, TraceHeader, WorkloadTask, build_trace

TASKS = (WorkloadTask("gcn", GraphRef("pubmed", 0, 10, 20)),)
ALL = ["ramp:0-2", "steps:0.5,1,2", "spikes:5,2,30", "spikes:5,2", "diurnal:0.2-1.8,7", "steps:0,1"]


@pytest.mark.parametrize(
    ("text", "multiples"),
    [
        ("ramp:0-2", {0.5: 0.01, 50: 1, 99.5: 1.99}),
        ("steps:0.5,1,2", {1: 0.5, 50: 1, 99: 2}),
        ("spikes:5,2,30", {1: 5, 3: 1, 31: 5, 33: 1}),
        ("spikes:5,2", {1: 5, 3: 1, 99: 1}),
        ("diurnal:0.2-1.8", {1: 0.2, 25: 1, 50: 1.8, 75: 1}),
        ("diurnal:0.2-1.8,10", {0.05: 0.2, 5: 1.8, 15: 1.8, 20: 0.2}),
        ("", {1: 1, 99: 1}),
    ],
)
def test_multiples_at_a_time(text, multiples):
    profile = parse_profile(text, 100)
    for at_s, expected in multiples.items():
        slope = (profile.worked_s(at_s + 0.01) - profile.worked_s(at_s - 0.01)) / 0.02
        assert slope == pytest.approx(expected, abs=0.02), at_s


@given(st.sampled_from(ALL), st.floats(0, 1))
def test_times_and_work_are_inverse(text, share):
    profile = parse_profile(text, 100)
    worked_s = share * profile.worked_s(100)
    assert profile.worked_s(profile.at_s(worked_s)) == pytest.approx(worked_s, abs=1e-6)


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("arrivals", ["poisson", "bursty", "even"])
def test_arrivals_follow_the_profile(text, arrivals):
    header = TraceHeader(workload="gcn", seed=5, rate_hz=200.0, profile=text, arrivals=arrivals)
    offsets_s = [one.offset_ns / 1e9 for one in build_trace(header, TASKS, duration_s=100).items]
    assert offsets_s == sorted(offsets_s)
    assert offsets_s[-1] < 100
    profile = parse_profile(text, 100)
    spread = {"poisson": 1, "even": 0.1, "bursty": 400}[arrivals]
    for begin, end in ((0, 100), (0, 30), (60, 100)):
        expected = 200 * (profile.worked_s(end) - profile.worked_s(begin))
        found = sum(begin <= at_s < end for at_s in offsets_s)
        assert found == pytest.approx(expected, abs=5 * math.sqrt(spread * expected) + 2)


def test_after_its_end_a_profile_goes_on_as_it_ended():
    profile = parse_profile("steps:1,3", 10)
    assert profile.worked_s(12) == 5 + 15 + 6
    assert profile.at_s(26) == 12


def test_even_arrivals_have_equal_distances():
    header = TraceHeader(workload="gcn", seed=1, rate_hz=50.0, arrivals="even")
    offsets = [one.offset_ns for one in build_trace(header, TASKS, count=20).items]
    gaps = {after - before for before, after in pairwise(offsets)}
    assert max(gaps) - min(gaps) <= 1
    assert random.Random("arrivals 1").random() * 2e7 == pytest.approx(offsets[0], abs=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wave:1", "'wave:1' is not one of ramp:FROM-TO"),
        ("ramp:1", "is not ramp:FROM-TO"),
        ("ramp:-1-2", "is not ramp:FROM-TO"),
        ("steps:", "is not steps:"),
        ("steps:1,nan", "is not steps:"),
        ("steps:1,inf", "is not steps:"),
        ("spikes:5,30,2", "is not spikes:"),
        ("spikes:5", "is not spikes:"),
        ("spikes:5,1,2,3", "is not spikes:"),
        ("diurnal:1-2,0", "is not diurnal:"),
        ("steps:0,0", "no time with a rate above 0"),
        ("spikes:5,1e-9,2e-9", "its period is too short for 100 s"),
    ],
)
def test_what_is_no_profile_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_profile(text, 100)


def test_a_profile_needs_a_duration():
    with pytest.raises(ConfigError, match="give a duration too"):
        parse_profile("ramp:0-2", None)
