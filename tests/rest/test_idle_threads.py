"""Work on large bodies gives way to everything else on the machine."""

import asyncio
import os
import threading

from serve.rest.idle_threads import in_thread


def how():
    thread_id = threading.get_native_id()
    return (
        thread_id,
        os.getpriority(os.PRIO_PROCESS, thread_id),
        os.sched_getscheduler(thread_id),
    )


def test_only_large_bodies_go_to_threads_that_idle():
    own = how()
    assert asyncio.run(in_thread(100, how)) == own
    thread_id, niceness, policy = asyncio.run(in_thread(1 << 20, how))
    assert thread_id != own[0]
    assert (niceness, policy) == (19, os.SCHED_IDLE)
    assert how() == own
