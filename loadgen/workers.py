"""Runs sent by several processes, without Locust's web UI: this process is their master."""

from loadgen import patched  # noqa: F401  isort: skip

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Self

import gevent
from locust.env import Environment
from locust.runners import MasterRunner

from loadgen.loop import Loop
from loadgen.master import Master
from loadgen.native import refuse_unsendable, require_native
from loadgen.options import LoadOptions
from loadgen.plan import make_plan
from loadgen.run import until_ended
from loadgen.target import Target
from loadgen.users import Load
from serve.errors import NotReady

_LOCAL = "127.0.0.1"
#: Time for started workers to connect, and for those of other machines.
_CONNECT_S = 120.0
_AWAITED_S = 600.0
_END_S = 10.0
_LOOK_S = 0.2


class LoadWorkers:
    """A number of processes that send runs together, started here or awaited from elsewhere."""

    def __init__(self, count: int, *, native: bool, listen: tuple[str, int] | None = None) -> None:
        """Take the port; `listen` has host and port for workers that others start.

        Raises NotReady when the port cannot be had.
        """
        self._count = count
        self._native = native
        self._listen = listen
        environment = Environment(user_classes=[Load])
        environment.open_loop = None
        environment.on_sample = lambda _: None
        try:
            self._runner: MasterRunner = environment.create_master_runner(*(listen or (_LOCAL, 0)))
        except SystemExit:  # Locust's way to say so, after a line in the log
            raise NotReady(f"master {listen}: the port is taken") from None
        self._master = Master(self._runner, lambda _: None)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Start the processes, unless they are started elsewhere; returns at once."""
        if self._listen is None:
            port = self._runner.server.port
            self._processes = [start_worker(_LOCAL, port) for _ in range(self._count)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the workers."""
        self._runner.quit()
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_END_S)

    def run(self, options: LoadOptions, on_progress: Callable[[Loop], None]) -> Loop:
        """Load `options.target` and return the run; SIGINT or SIGTERM end the run early.

        Raises ConfigError, UnknownName or NotReady before the first request, never afterwards.
        """
        options.check()
        if self._native:
            refuse_unsendable(options)
            require_native()
        target = Target(options.target, options.tokens(), options.ca)
        try:
            plan = make_plan(options, target, encoded=False)
        finally:
            target.close()
        self._wait_for_workers()
        loop = self._master.prepare(plan, options, native=self._native)
        try:
            self._runner.start(self._count, spawn_rate=self._count)
            self._master.begin()
            until_ended(loop, on_progress)
        finally:
            # Workers tell what they have before they say that they have stopped.
            self._runner.stop()
        return loop

    def _wait_for_workers(self) -> None:
        wait_s = _CONNECT_S if self._listen is None else _AWAITED_S
        give_up_s = monotonic() + wait_s
        while (found := len(self._runner.clients.ready)) < self._count:
            if any(process.poll() is not None for process in self._processes):
                raise NotReady("a worker has ended before it connected; its error is above")
            if monotonic() > give_up_s:
                raise NotReady(f"{found} of {self._count} workers are there after {wait_s:g} s")
            gevent.sleep(_LOOK_S)


def start_workers_for_exec(count: int) -> list[str]:
    """Start workers for the Locust that this process is about to become; returns its options.

    They end with it.
    """
    with socket.socket() as probe:
        probe.bind((_LOCAL, 0))
        port = probe.getsockname()[1]
    for _ in range(count):
        process = start_worker(_LOCAL, port)
        assert process.stdin is not None
        # Stays open until the program that this process becomes has ended.
        os.set_inheritable(os.dup(process.stdin.fileno()), True)
    return [
        "--master",
        f"--master-bind-host={_LOCAL}",
        f"--master-bind-port={port}",
        f"--expect-workers={count}",
    ]


def start_worker(host: str, port: int) -> "subprocess.Popen[bytes]":
    """Start a worker for the master at `host` and `port`; it ends with this process."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "loadgen.worker", host, str(port)],
        stdin=subprocess.PIPE,
        # Signals of the terminal are for the master, which stops its workers.
        start_new_session=True,
    )
