"""The files of models stay open as long as a lane may still open them, and no longer."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from serve.ipc.messages import LoadModel, UnloadModel
from serve.models.repository import find
from serve.server.lanes import load_watch
from serve.server.lanes.lane_models import LaneModels
from tests.e2e.support import REPOSITORY

LANE = 0
KEY = "gcn:1@hash eager"


@pytest.fixture
def sent():
    return []


@pytest.fixture
def models(sent):
    pool = SimpleNamespace(
        send=lambda lane_id, message: sent.append((lane_id, type(message), message)),
        successors=None,
        calibrators=SimpleNamespace(interrupted=False),
        domain_of={LANE: ""}.get,
    )
    found = LaneModels(pool, 1.0)
    yield found
    found.close()


def never():
    return SimpleNamespace(calling=lambda wake: nullcontext(), cancelled=False, check=lambda: None)


def added(models, key=KEY):
    message = LoadModel(key, models.copy_files(find(REPOSITORY, "gcn")), None)
    models.add(message)
    return message


def is_open(message):
    return os.path.exists(message.spec.copied_weights)


def test_a_lane_that_comes_up_can_read_what_is_dropped_meanwhile(models, sent):
    message = added(models)
    assert not models.lane_up(LANE)
    models.drop(KEY)
    assert [kind for _, kind, _ in sent] == [LoadModel, UnloadModel]
    assert is_open(message)
    assert models.answered(LANE, KEY)
    assert not is_open(message)


@pytest.mark.parametrize("end", ["lost", "taken over"])
def test_the_end_of_the_lane_closes_what_it_was_to_read(models, end):
    message = added(models)
    models.lane_up(LANE)
    models.drop(KEY)
    if end == "lost":
        models.lane_lost(LANE)
    else:
        models.taken_over(LANE, frozenset())
    assert not is_open(message)


def test_an_answer_for_what_was_dropped_is_none_for_its_next_load(models, sent):
    first = added(models)
    models.lane_up(LANE)
    models.drop(KEY)
    second = added(models)
    answers = iter([lambda: models.answered(LANE, KEY, "it is a named pipe"),
                    lambda: models.answered(LANE, KEY)])  # fmt: skip

    def wait_for(condition, timeout_s):
        while not condition():
            next(answers)()
        return True

    models._answers.wait_for = wait_for
    models.load(second, never())
    assert next(answers, None) is None
    assert (is_open(first), is_open(second)) == (False, True)


def test_a_lane_that_comes_up_and_says_nothing_is_ended(models, monkeypatch):
    now, ended = [0], []
    monkeypatch.setattr(load_watch.clock, "now_ns", lambda: now[0])
    models._pool.kill = lambda lane_id, why: ended.append((lane_id, why))
    added(models)
    added(models, "other")
    assert not models.lane_up(LANE)
    now[0] = 900_000_000
    assert not models.answered(LANE, KEY)
    now[0] = 1_800_000_000
    models.watch.look()
    assert not ended, "it has said something since"
    now[0] = 2_000_000_000
    models.watch.look()
    models.watch.look()
    (found,) = ended
    assert found == (LANE, "a model did not load within server.start_timeout_s = 1 seconds")
    models.lane_lost(LANE)
    models.lane_up(LANE)
    assert not models.answered(LANE, KEY)
    assert models.answered(LANE, "other")
    now[0] = 9_000_000_000
    models.watch.look()
    assert len(ended) == 1


def test_files_are_open_while_successors_read_them(models):
    message = added(models)
    models.lane_up(LANE)
    models.answered(LANE, KEY)
    models._loaded.add(KEY)
    models.in_service = True
    another = added(models, "gcn:2@hash eager")
    seen = []

    def load(lanes, messages, timeout_s, cancellation):
        models.drop(KEY)
        seen.extend(is_open(one) for one in messages)
        models.taken_over(LANE, frozenset(one.key for one in messages))

    models._pool.successors = SimpleNamespace(load=load, withdraw=lambda lanes: None)
    models.load(another, never())
    assert seen == [True, True]
    assert (is_open(message), is_open(another)) == (False, True)


def test_a_dropped_model_that_all_lanes_have_is_closed_at_once(models):
    message = added(models)
    models.lane_up(LANE)
    models.answered(LANE, KEY)
    models.drop(KEY)
    assert not is_open(message)
