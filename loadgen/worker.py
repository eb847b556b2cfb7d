"""Worker of a run in several processes: sends its part for a Locust master and tells what came.

`python -m loadgen.worker HOST PORT` works for the master there, until that ends.
"""

from loadgen import patched  # noqa: F401  isort: skip

import logging
import os
import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import gevent
from gevent.event import Event
from gevent.os import tp_read
from locust.env import Environment
from locust.exception import RPCError

from loadgen.master import FAILED, PART, PREPARED, SAMPLES, START, TAKEN, boot_id
from loadgen.measure import Sample
from loadgen.native import require_native
from loadgen.native_green import NativeGreenLoop
from loadgen.open_loop import OpenLoop
from loadgen.parts import LoadPart, told
from loadgen.plan import LoadPlan, encode_trace
from loadgen.target import Target
from loadgen.users import Load, report_sample
from serve.errors import NotReady, ServeError

_log = logging.getLogger(__name__)
#: Interval at which samples are told.
_TELL_S = 0.5


class PartLoop:
    """One part of a run: waits for the start, sends, and tells the master."""

    def __init__(self, environment: Environment, part: LoadPart) -> None:
        """Connect and make the requests; raises ServeError."""
        self._environment = environment
        self._part = part
        self._samples: list[Sample] = []
        self._sending: gevent.Greenlet | None = None
        self._over = Event()
        options = part.options
        self._target = Target(options.target, options.tokens(), options.ca)
        try:
            # The heartbeat has to go on meanwhile.
            messages = encode_trace(part.trace, options, self._target, lambda: gevent.sleep(0))
            plan = LoadPlan(part.trace, messages, part.closed)
            self._loop: OpenLoop | NativeGreenLoop
            if part.native:
                require_native()
                self._loop = NativeGreenLoop(plan, options.target, options.timeout_s)
            else:
                self._loop = OpenLoop(plan, self._target, options.timeout_s)
        except BaseException:
            self._target.close()
            raise

    @property
    def run(self) -> int:
        """Number of the run."""
        return self._part.run

    def start(self, at_ns: int) -> None:
        """Send from then on, on the monotonic clock."""
        self._loop.start_at_ns = at_ns
        self._sending = gevent.spawn(self._send)

    def stop(self) -> None:
        """End the part, and tell the master what there is."""
        if self._sending is not None:
            self._sending.kill()
        self._over.set()
        self._target.close()

    def drive(self, report: Callable[[Sample], None]) -> None:
        """Wait until the part has ended; what it sends is in the statistics anyway."""
        self._over.wait()

    def _send(self) -> None:
        telling = gevent.spawn(self._tell_often)
        try:
            if self._loop.plan.messages:
                self._loop.drive(self._hear)
        except ServeError as error:
            runner = self._environment.runner
            runner.log_exception(runner.client_id, str(error), "")
            _log.error("%s", error)
        finally:
            telling.kill()
            self._tell(over=True)
            self._over.set()

    def _hear(self, sample: Sample) -> None:
        report_sample(self._environment, sample, Load.late_is_failure)
        self._samples.append(sample)

    def _tell_often(self) -> None:
        while True:
            gevent.sleep(_TELL_S)
            self._tell(over=False)

    def _tell(self, *, over: bool) -> None:
        samples, self._samples = self._samples, []
        data = told(self.run, self._loop, samples, over=over)
        self._environment.runner.send_message(SAMPLES, data)


def attach(environment: Environment) -> None:
    """Have the worker of `environment` take parts of runs and send them."""
    runner = environment.runner
    environment.open_loop = None
    environment.on_sample = lambda _: None
    taken_run: int | None = None

    def take(environment: Environment, msg: Any, **_: Any) -> None:
        """Make the requests of a part, and say so; a part that comes again is passed over."""
        nonlocal taken_run
        part = LoadPart.decode(msg.data)
        runner.send_message(TAKEN, {"run": part.run})
        if part.run == taken_run:
            return
        taken_run = part.run
        stop()
        try:
            environment.open_loop = PartLoop(environment, part)
        except ServeError as error:
            runner.send_message(FAILED, {"run": part.run, "error": str(error)})
        else:
            runner.send_message(PREPARED, {"run": part.run})

    def start(environment: Environment, msg: Any, **_: Any) -> None:
        part = environment.open_loop
        if part is None or part.run != msg.data["run"]:
            return
        # Another machine has another clock: there the message's way is added.
        same_clock = msg.data["boot"] == boot_id()
        part.start(msg.data["at_ns"] if same_clock else monotonic_ns() + msg.data["in_ns"])

    def stop(**_: Any) -> None:
        if environment.open_loop is not None:
            environment.open_loop.stop()
            environment.open_loop = None

    # Taking a part lasts, and the worker has to hear its master meanwhile.
    runner.register_message(PART, take, concurrent=True)
    runner.register_message(START, start)
    environment.events.test_stop.add_listener(stop)


def work_for(host: str, port: int) -> None:
    """Send parts of runs for the master there until it ends; raises NotReady when it is absent."""
    environment = Environment(user_classes=[Load])
    try:
        runner = environment.create_worker_runner(host, port)
    except (ConnectionError, RPCError) as error:
        raise NotReady(f"no master at {host}:{port}: {error}") from None
    attach(environment)
    runner.greenlet.join()


def main() -> None:
    """Work for the master at HOST PORT, until it ends or standard input is closed."""
    gevent.spawn(_end_with_input)
    work_for(sys.argv[1], int(sys.argv[2]))


def _end_with_input() -> None:
    while tp_read(sys.stdin.fileno(), 1):
        pass
    # Whoever started this process has ended; nobody wants its samples.
    os._exit(1)


if __name__ == "__main__":
    main()
