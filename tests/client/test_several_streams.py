"""Streams of a client of several servers, without the servers."""

import asyncio
import threading
from itertools import count

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.client.retries import TimeLimit
from serve.client.several_streams import AT_ONCE, AsyncCalls, Calls

MESSAGES = [b"%d" % number for number in range(5 * AT_ONCE)]


def test_a_stream_asks_no_faster_than_its_answers_are_read():
    asked = []

    def ask(message):
        asked.append(message)
        return message

    answers = iter(Calls(ask, iter(MESSAGES), TimeLimit(PATIENCE_S)))
    found = [next(answers)]
    wait_for(lambda: len(asked) > AT_ONCE, "calls for all places")
    for taken in count(1):
        assert len(asked) <= AT_ONCE + taken
        if (answer := next(answers, None)) is None:
            break
        found.append(answer)
    assert sorted(found) == sorted(MESSAGES)


def test_a_stream_of_tasks_asks_no_faster_than_its_answers_are_read():
    asked = []

    async def ask(message):
        asked.append(message)
        return message

    async def messages():
        for message in MESSAGES:
            yield message

    async def read():
        found = []
        async for answer in AsyncCalls(ask, messages(), TimeLimit(PATIENCE_S)):
            found.append(answer)
            for _ in range(len(MESSAGES)):
                await asyncio.sleep(0)
            assert len(asked) <= AT_ONCE + len(found)
        return found

    assert sorted(asyncio.run(read())) == sorted(MESSAGES)


def test_a_stream_that_is_given_up_leaves_no_thread():
    before = set(threading.enumerate())
    calls = Calls(bytes, iter(MESSAGES), TimeLimit(PATIENCE_S))
    next(iter(calls))
    calls.cancel()
    wait_for(lambda: set(threading.enumerate()) <= before, "the end of the stream's threads")
