"""Which version of a model answers: shares, the same id always alike, and canaries on trial."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.core.versions.canary import WINDOW, CanaryTakenBack, RequestEnd
from serve.core.versions.comparison import LEAST
from serve.core.versions.router import VersionRouter
from serve.core.versions.rules import VersionRules

IDS = [f"request-{number}" for number in range(10_000)]


def always(version):
    return True


def chosen(rules, ids=IDS, serves=always, model="m"):
    return [rules.choose(model, one, serves) for one in ids]


@st.composite
def splits(draw):
    """Rules of two to six versions with whole percents."""
    versions = sorted(draw(st.sets(st.integers(1, 99), min_size=2, max_size=6)))
    cuts = sorted(draw(st.sets(st.integers(1, 99), min_size=len(versions) - 1,
                               max_size=len(versions) - 1)))  # fmt: skip
    percents = [high - low for low, high in zip([0, *cuts], [*cuts, 100], strict=True)]
    return VersionRules(tuple((v, float(p)) for v, p in zip(versions, percents, strict=True)))


# -- shares ---------------------------------------------------------------------------------------


def test_a_tenth_is_a_tenth_of_ten_thousand_requests():
    found = chosen(VersionRules(((1, 90.0), (2, 10.0))))
    assert 0.09 <= found.count(2) / len(found) <= 0.11


@given(splits(), st.text(max_size=20))
def test_shares_lie_within_five_standard_deviations_of_a_binomial(rules, model):
    ids, found = IDS[:2000], {}
    for version in chosen(rules, ids, model=model):
        found[version] = found.get(version, 0) + 1
    for version, percent in rules.shares:
        share, count = percent / 100, len(ids)
        spread = 5 * (count * share * (1 - share)) ** 0.5 + 1
        assert abs(found.get(version, 0) - count * share) <= spread


@given(splits(), st.text(max_size=50))
def test_the_same_id_always_goes_to_the_same_version(rules, request_id):
    assert len(set(chosen(rules, [request_id] * 3))) == 1


def test_models_are_split_independently():
    rules = VersionRules(((1, 50.0), (2, 50.0)))
    pairs = zip(chosen(rules, model="a"), chosen(rules, model="b"), strict=True)
    assert 0.47 <= sum(one == other for one, other in pairs) / len(IDS) <= 0.53


@given(st.integers(1, 98), st.integers(1, 98))
def test_a_share_that_grows_keeps_the_requests_that_it_had(first, second):
    small, large = sorted((first, second))
    before = chosen(VersionRules(((1, 100.0 - small), (2, float(small)))), IDS[:500])
    after = chosen(VersionRules(((1, 100.0 - large), (2, float(large)))), IDS[:500])
    assert all(new == 2 for old, new in zip(before, after, strict=True) if old == 2)


@given(splits(), st.data())
def test_only_the_requests_of_a_version_that_is_gone_move(rules, data):
    gone = data.draw(st.sampled_from(rules.shares))[0]
    before = chosen(rules, IDS[:300])
    after = chosen(rules, IDS[:300], lambda version: version != gone)
    assert gone not in after
    assert all(old in (gone, new) for old, new in zip(before, after, strict=True))


def test_versions_without_a_share_get_nothing_even_when_nothing_else_is_served():
    rules = VersionRules(((1, 50.0), (2, 50.0)))
    assert chosen(rules, ["a"], lambda version: version == 3) == [None]
    assert rules.main(lambda version: version == 3) is None
    assert rules.main(always) == 1


def test_a_pin_is_a_split_of_one():
    assert set(chosen(VersionRules(((7, 100.0),)), IDS[:100])) == {7}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"shares": ((1, 90.0), (2, 11.0))}, "1=90 2=11 is 101 percent in all, not 100"),
        ({"shares": ((2, 50.0), (1, 50.0))}, "must ascend"),
        ({"shares": ((1, 50.0), (1, 50.0))}, "none twice"),
        ({"shares": ((1, 0.0), (2, 100.0))}, "above 0"),
        ({"shares": ((1, float("nan")), (2, 50.0))}, "above 0"),
        ({"shares": ((0, 100.0),)}, "positive integer"),
        ({"shares": ((1, 100.0),), "canary": 1}, "beside another's"),
        ({"shares": ((1, 100.0),), "canary": 2}, "beside another's"),
        ({"shares": ((1, 100.0),), "shadow": 1}, "answers requests already"),
        ({"shadow": 2, "shadow_percent": 0.0}, "above 0"),
        ({"shares": tuple((n, 100 / 17) for n in range(1, 18))}, "at most 16"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules, words):
    with pytest.raises(ValueError, match=words):
        VersionRules(**rules)


def test_a_shadow_gets_its_share_whatever_version_answers():
    rules = VersionRules(((1, 50.0), (2, 50.0)), shadow=3, shadow_percent=20.0)
    answered = {1: [0, 0], 2: [0, 0]}
    for one in IDS:
        answered[rules.choose("m", one, always)][rules.shadows("m", one)] += 1
    for without, copied in answered.values():
        assert 0.17 <= copied / (without + copied) <= 0.23


# -- canaries -------------------------------------------------------------------------------------


def on_trial(share=10.0):
    router = VersionRouter()
    router.set_rules("m", VersionRules(((1, 100 - share), (2, share)), canary=2))
    return router


def play(router, draw, *, late=(0.0, 0.0), failed=(0.0, 0.0), requests=5000):
    """Ends with these chances, of the others and of the canary; the event, and after how many."""
    for number in range(requests):
        version = router.choose("m", f"{number}", always)
        own = version == 2
        end = RequestEnd(version, draw.random() < late[own], draw.random() < failed[own])
        if (event := router.ended("m", end)) is not None:
            return event, number
    return None, requests


def test_a_canary_that_fails_is_taken_back_after_the_least_count():
    router = on_trial()
    event, after = play(router, random.Random(1), failed=(0.0, 1.0))
    assert isinstance(event, CanaryTakenBack)
    assert (event.model, event.version) == ("m", 2)
    assert f"{LEAST} of its last {LEAST} requests failed" in event.reason
    assert after < 1.5 * LEAST * 10
    assert router.rules("m") == VersionRules(((1, 100.0),))
    assert not router.watches("m")


def test_a_canary_that_is_late_is_taken_back():
    event, after = play(on_trial(), random.Random(2), late=(0.05, 0.4))
    assert event is not None
    assert "were late" in event.reason
    assert after < 1500


@pytest.mark.parametrize("chance", [0.0, 0.02, 0.3, 0.9, 1.0])
def test_a_canary_like_the_others_stays(chance):
    taken = [
        seed
        for seed in range(20)
        if play(on_trial(30.0), random.Random(seed), late=(chance, chance),
                failed=(chance / 2, chance / 2), requests=3000)[0]
    ]  # fmt: skip
    assert taken == []


def test_a_canary_better_than_the_others_stays():
    assert play(on_trial(), random.Random(3), late=(0.5, 0.1), failed=(0.2, 0.0))[0] is None


def test_what_was_long_ago_does_not_count():
    router = on_trial(50.0)
    good = play(router, random.Random(4), requests=4 * WINDOW)[0]
    assert good is None
    event, after = play(router, random.Random(5), failed=(0.0, 0.5))
    assert event is not None
    assert after < 4 * LEAST  # not watered down by all the good ends before the window


def test_the_canarys_share_goes_to_the_others_in_proportion():
    router = VersionRouter()
    rules = VersionRules(((1, 60.0), (2, 20.0), (3, 20.0)), canary=3, shadow=9)
    router.set_rules("m", rules)
    for _ in range(LEAST):
        router.ended("m", RequestEnd(1, False, False))
    events = [router.ended("m", RequestEnd(3, False, True)) for _ in range(LEAST)]
    assert [event is not None for event in events].index(True) < LEAST
    left = router.rules("m")
    assert left.shares == ((1, 75.0), (2, 25.0))
    assert left.shadow == 9


def test_a_canary_of_any_share_leaves_all_to_the_other():
    for hundredths in range(1, 10_000):
        percent = hundredths / 100
        rules = VersionRules(((1, percent), (2, 100 - percent)), canary=2).without_canary()
        assert rules.shares == ((1, pytest.approx(100.0)),)


def test_other_versions_and_other_models_are_not_counted():
    router = on_trial()
    for version in (3, 4):
        for _ in range(2 * LEAST):
            assert router.ended("m", RequestEnd(version, True, True)) is None
            assert router.ended("other", RequestEnd(2, True, True)) is None
    assert router.rules("m").canary == 2


def test_a_canary_is_watched_anew_when_its_split_changes_but_not_for_a_shadow():
    router = on_trial()
    for _ in range(LEAST):
        router.ended("m", RequestEnd(1, False, False))
    for _ in range(LEAST - 1):
        router.ended("m", RequestEnd(2, False, True))
    rules = router.rules("m")
    router.set_rules("m", VersionRules(rules.shares, rules.canary, shadow=5))
    assert router.ended("m", RequestEnd(2, False, True)) is not None
    router.set_rules("m", rules)
    assert router.ended("m", RequestEnd(2, False, True)) is None
