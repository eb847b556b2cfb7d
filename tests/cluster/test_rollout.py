"""When a pool that changes by itself is deployed, and what an update that is given up holds up."""

import msgspec
import pytest

from serve.cluster.rollout import DEPLOY_AGAIN_NS, MOST_END_NS, Rollout
from tests.cluster.pools import NEW, OLD, ON_TRIAL, POOL, S, announced


def none(_generation):
    return False


def its_server(generation):
    return generation == NEW.generation


def failed(now_ns=0):
    """Return a rollout whose update was on trial and did not start."""
    found = Rollout(ON_TRIAL, 0)
    found.not_started("2", "no such key", now_ns)
    return found


def test_what_was_set_is_not_due_and_what_it_became_is_until_it_is_deployed():
    found = Rollout(ON_TRIAL, 0)
    assert found.due(none, 0) is None
    assert "on trial" in found.told
    found.not_started("2", "no such key", 0)
    assert found.told == "the servers are being deployed anew"
    pool = found.due(none, 0)
    assert pool.spec == OLD
    found.deployed(pool)
    assert (found.due(none, 0), found.told) == (None, "")


def test_a_deployment_that_failed_is_due_again_later():
    found = failed()
    found.not_deployed("Ray is busy", 10)
    assert found.problem == "the servers were not deployed anew: Ray is busy"
    assert found.due(none, 9 + DEPLOY_AGAIN_NS) is None
    found.deployed(found.due(none, 10 + DEPLOY_AGAIN_NS))
    assert found.problem == ""


def test_what_changed_during_a_deployment_is_due_after_it():
    found = failed()
    found.deployed(msgspec.structs.replace(POOL, replicas=3))
    assert found.due(none, 0) == found.pool


def test_the_server_of_an_update_that_is_given_up_ends_first_or_has_its_time():
    found = failed(now_ns=10)
    assert not found.is_settled(its_server, 10)
    assert found.due(its_server, 10 + MOST_END_NS) is None
    assert found.due(none, 10) == found.due(its_server, 11 + MOST_END_NS) == found.pool


@pytest.mark.parametrize("give_up", [
    lambda found: found.leave_alone(0),
    lambda found: found.keep(POOL, 0),
], ids=["the cluster ends", "another pool"])  # fmt: skip
def test_an_update_on_trial_is_given_up_with(give_up):
    found = Rollout(ON_TRIAL, 0)
    assert (found.goes_on("2"), found.is_settled(its_server, 0)) == (None, True)
    give_up(found)
    assert (found.goes_on("2"), found.is_settled(its_server, 0)) == (False, False)


def test_an_update_whose_trial_has_ended_badly_is_given_up():
    found = Rollout(ON_TRIAL, 0)
    for is_ready in (True, False):
        found.take(announced("b", "2", ready=is_ready), 0)
    found.change(1, 61 * S)
    assert found.pool.spec == OLD
    assert not found.is_settled(its_server, 61 * S)


def test_the_same_update_set_again_stays_on_trial():
    found = Rollout(ON_TRIAL, 0)
    found.keep(msgspec.structs.replace(ON_TRIAL, replicas=3), 0)
    assert found.is_settled(its_server, 0)


def test_a_cluster_that_is_about_to_end_changes_no_more_until_it_is_set_anew():
    found = failed()
    found.leave_alone(0)
    assert (found.due(none, 0), found.goes_on("")) == (None, False)
    found.keep(POOL, 0)
    assert (found.due(none, 0), found.goes_on("")) == (None, True)
