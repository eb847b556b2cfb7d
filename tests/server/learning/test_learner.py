"""Lessons of ended runs, and what the scheduler hears of them."""

import threading
from types import SimpleNamespace

from serve.core.events import SlowdownChanged
from serve.core.jobs.events import JobSlowdownChanged
from serve.estimate.slowdown import Slowdowns
from serve.server.learning.learner import Learner


def test_lessons_are_learned_once_and_a_bug_in_one_spares_the_others(caplog):
    def broken():
        raise RuntimeError("a bug")

    learned = []
    catalogue = SimpleNamespace(slowdown=Slowdowns())
    learner = Learner(catalogue, threading.Lock(), (1.0,))
    for lesson in (broken, lambda: learned.append(1)):
        learner.add(lesson)
    assert learner.backlog == 2
    assert learner.learn() == []
    learner.learn()
    assert (learned, learner.backlog) == ([1], 0)
    assert "cannot be learned from" in caplog.text


def test_the_scheduler_hears_of_a_slowdown_once_while_it_is_news():
    by_runs, by_jobs = SimpleNamespace(table=(1.0, 1.5)), SimpleNamespace(table=(1.0,))
    catalogue = SimpleNamespace(slowdown=SimpleNamespace(by_runs=by_runs, by_jobs=by_jobs))
    learner = Learner(catalogue, threading.Lock(), (1.0,))
    assert learner.learn() == [SlowdownChanged((1.0, 1.5))]
    assert learner.learn() == []
    by_runs.table = (1.0, 1.51)
    assert learner.learn() == []
    by_jobs.table = (1.0, 1.2)
    assert learner.learn() == [JobSlowdownChanged((1.0, 1.2))]
    by_runs.table = (1.0, 2.0)
    by_jobs.table = (1.0, 1.21)
    assert learner.learn() == [SlowdownChanged((1.0, 2.0))]
