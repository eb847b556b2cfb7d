"""Load run with Locust as a library, without its web UI and command line."""

from collections.abc import Callable
from signal import SIGINT, SIGTERM

from loadgen import patched  # noqa: F401  isort: skip

import gevent
from gevent.event import Event
from locust.env import Environment

from loadgen.loop import Loop
from loadgen.master import GreenDividedLoop
from loadgen.open_loop import OpenLoop
from loadgen.options import LoadOptions
from loadgen.plan import make_plan
from loadgen.target import Target
from loadgen.users import Load

#: Interval of the progress line.
_PROGRESS_S = 0.5


def run_load(options: LoadOptions, on_progress: Callable[[Loop], None] = lambda _: None) -> Loop:
    """Load `options.target` and return the run; SIGINT or SIGTERM end the run early.

    Raises ConfigError, UnknownName or NotReady before the first request, never afterwards.
    """
    options.check()
    target = Target(options.target, options.tokens(), options.ca)
    try:
        loop = OpenLoop(make_plan(options, target), target, options.timeout_s)
        _drive(loop, on_progress)
        return loop
    finally:
        target.close()


def _drive(loop: OpenLoop, on_progress: Callable[[Loop], None]) -> None:
    environment = Environment(user_classes=[Load])
    environment.open_loop = loop
    environment.on_sample = lambda _: None
    runner = environment.create_local_runner()
    runner.start(1, spawn_rate=1)
    try:
        until_ended(loop, on_progress)
    finally:
        runner.quit()


def until_ended(loop: OpenLoop | GreenDividedLoop, on_progress: Callable[[Loop], None]) -> None:
    """Return when the run has ended, or on SIGINT or SIGTERM; raises what ended the run."""
    stop = Event()
    handlers = [gevent.signal_handler(number, stop.set) for number in (SIGINT, SIGTERM)]
    try:
        while not (loop.ended.ready() or stop.is_set()):
            on_progress(loop)
            gevent.wait([loop.ended, stop], timeout=_PROGRESS_S, count=1)
        if loop.ended.ready():
            loop.ended.get()
    finally:
        for handler in handlers:
            handler.cancel()
