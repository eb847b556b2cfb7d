"""Requests that wait for one lane together, so that they may run as one."""

from concurrent.futures import Future, ThreadPoolExecutor, wait

from serve.core.lifecycle import State
from tests.processes import PATIENCE_S, wait_for
from tests.server.test_engine import call


def ended_together(engine, trouble, calls) -> list[Future]:
    """Return the ended calls, all prepared before the lane is free."""
    with ThreadPoolExecutor(4) as threads:
        with trouble.holding() as held:
            first = threads.submit(engine.submit(call(held)).result)
            wait_for(lambda: trouble.running() or first.done(), "a running request")
            assert not first.done(), first.result()
            tickets = [engine.submit(one) for one in calls]
            answers = [threads.submit(ticket.result) for ticket in tickets]
            state = engine.driver.scheduler.state
            for ticket in tickets:
                wait_for(lambda t=ticket: state(t.task.task_id) is State.READY, "a prepared task")
        first.result(PATIENCE_S)
        assert not wait(answers, PATIENCE_S).not_done
        return answers


def all_at_once(engine, trouble, calls):
    """Return the answers to the calls, all prepared before the lane is free."""
    return [one.result() for one in ended_together(engine, trouble, calls)]
