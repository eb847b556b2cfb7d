"""Trials of configurations, by every way in which they can end."""

from hypothesis import given
from hypothesis import strategies as st

from serve.core.cluster.growth import Growth
from serve.core.cluster.trial import SILENT_NS, Trial, TrialEnd
from serve.core.versions.comparison import LEAST, Ends

S = 1_000_000_000
LASTS = 60 * S


def told(trial, own, others, at_s, is_ready=True):
    trial.told("new", own, on_trial=True, is_ready=is_ready, now_ns=at_s * S)
    trial.told("old", others, on_trial=False, is_ready=True, now_ns=at_s * S)


def test_one_that_does_like_the_others_is_kept_when_its_time_is_over():
    trial = Trial(LASTS)
    for second in range(60):
        told(trial, Ends(10 * second, second // 10), Ends(30 * second, second // 5), second)
        assert trial.verdict(second * S) is None
    assert trial.verdict(60 * S) == TrialEnd(True)


def test_one_that_fails_is_taken_back_at_once_with_the_numbers():
    trial = Trial(LASTS)
    told(trial, Ends(), Ends(1000, 10, 5), 0)
    told(trial, Ends(LEAST - 1, 0, LEAST - 1), Ends(1000 + LEAST, 10, 5), 1)
    assert trial.verdict(1 * S) is None
    told(trial, Ends(LEAST, 0, LEAST), Ends(1000 + LEAST, 10, 5), 2)
    verdict = trial.verdict(2 * S)
    assert not verdict.kept
    assert f"{LEAST} of its last {LEAST} requests failed" in verdict.reason
    assert f"0 of {LEAST} of the other servers'" in verdict.reason


def test_one_that_is_late_is_taken_back():
    trial = Trial(LASTS)
    told(trial, Ends(), Ends(), 0)
    told(trial, Ends(200, 100), Ends(200, 4), 5)
    assert "100 of its last 200 requests were late" in trial.verdict(5 * S).reason


def test_it_begins_when_the_server_on_trial_is_ready():
    trial = Trial(LASTS)
    told(trial, Ends(), Ends(500, 0, 500), 0, is_ready=False)
    assert trial.verdict(1000 * S) is None
    told(trial, Ends(), Ends(500, 0, 500), 1000)
    told(trial, Ends(100), Ends(600, 0, 500), 1001)
    # What ended before does not count, well or badly.
    assert trial.ends == (Ends(100), Ends(100))
    assert trial.verdict(1059 * S) is None
    assert trial.verdict(1060 * S) == TrialEnd(True)


def test_without_requests_it_is_kept_and_one_that_is_not_ready_at_the_end_is_not():
    for is_ready in (True, False):
        trial = Trial(LASTS)
        told(trial, Ends(), Ends(), 0)
        told(trial, Ends(), Ends(), 59, is_ready)
        verdict = trial.verdict(60 * S)
        assert verdict.kept is is_ready
        assert ("not ready" in verdict.reason) is not is_ready


def test_one_that_is_lost_with_its_machine_is_not_kept_and_a_pause_of_all_is_no_loss():
    trial = Trial(LASTS)
    told(trial, Ends(), Ends(), 10)
    assert trial.verdict(70 * S) == TrialEnd(True)
    trial.told("old", Ends(), on_trial=False, is_ready=True, now_ns=10 * S + SILENT_NS)
    assert trial.verdict(70 * S) == TrialEnd(True)
    trial.told("old", Ends(), on_trial=False, is_ready=True, now_ns=69 * S)
    assert trial.verdict(69 * S) is None
    verdict = trial.verdict(70 * S)
    assert not verdict.kept
    assert "said nothing for 59 s" in verdict.reason
    told(trial, Ends(), Ends(), 70)  # it was started anew
    assert trial.verdict(70 * S) == TrialEnd(True)


def test_counts_that_begin_again_are_added_to_what_they_were():
    growth = Growth()
    assert growth.of("a", (5, 5)) == (0, 0)
    assert growth.of("a", (7, 5)) == (2, 0)
    assert growth.of("a", (1, 1)) == (1, 1)
    assert growth.of("b", (3, 2), known=True) == (3, 2)


@given(
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    steps=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=40),
)
def test_a_trial_ends_in_time_and_blames_only_a_greater_share(shares, steps):
    trial, own, others = Trial(LASTS), Ends(), Ends()
    told(trial, own, others, 0)
    for second, (mine, theirs) in enumerate(steps, start=1):
        own = Ends(own.ended + mine, own.late + int(mine * shares[0]))
        others = Ends(others.ended + theirs, others.late + int(theirs * shares[1]))
        told(trial, own, others, second)
        assert trial.ends == (own, others)
        verdict = trial.verdict(second * S)
        if verdict is not None:
            assert not verdict.kept
            assert own.late / own.ended > others.late / others.ended
            return
    assert trial.verdict(LASTS) is not None
