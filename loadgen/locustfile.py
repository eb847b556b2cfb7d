"""Locust's own web UI for the open loop: `locust -f loadgen/locustfile.py --host HOST:PORT`.

The number of users is ignored: one user sends all requests, for `--duration` seconds. Failures in
the statistics are requests without an answer, and with `--late-fails` late answers as well.
"""

from loadgen import patched  # noqa: F401  isort: skip

import logging
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import gevent
from locust import events

from loadgen.open_loop import OpenLoop
from loadgen.options import LoadOptions
from loadgen.plan import make_plan
from loadgen.show import show_summary
from loadgen.target import Target
from loadgen.users import GraphUser
from serve.errors import ServeError
from serve.terminal import Console
from serve.workload import WORKLOADS, PoolSpec

_log = logging.getLogger(__name__)
_POOL = PoolSpec()


class Load(GraphUser):
    """The one user."""


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Graph requests")
    group.add_argument("--workload", choices=WORKLOADS, default="mix", help="list of tasks")
    group.add_argument("--rate", type=float, default=20.0, help="requests per second")
    group.add_argument("--rho", type=float, default=0.0, help="offered load; 0: use the rate")
    group.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals")
    group.add_argument("--seed", type=int, default=0, help="of tasks and arrivals")
    group.add_argument("--trace", default="", help="file to replay instead")
    group.add_argument("--scale", type=float, default=_POOL.scale, help="of generated graphs")
    group.add_argument("--max-nodes", type=int, default=_POOL.max_nodes, help="largest subgraph")
    group.add_argument("--data", env_var="GNNSERVE_DATA", default="", help="real graphs' folder")
    group.add_argument("--late-fails", action="store_true", help="count late answers as failures")


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _prepare(environment: Any, **_: Any) -> None:
    """Make the run's plan from what was typed into the UI or the command line."""
    given = environment.parsed_options
    Load.late_is_failure = given.late_fails
    options = LoadOptions(
        target=(environment.host or "").removeprefix("http://").rstrip("/"),
        workload=given.workload,
        rate_hz=None if given.trace or given.rho else given.rate,
        rho=None if given.trace else given.rho or None,
        duration_s=given.duration,
        seed=given.seed,
        pool=PoolSpec(scale=given.scale, max_nodes=given.max_nodes),
        data=Path(given.data) if given.data else None,
        trace=Path(given.trace) if given.trace else None,
    )
    environment.open_loop = None
    try:
        target = environment.gnnserve_target = Target(options.target)
        loop = OpenLoop(make_plan(options, target), target, options.timeout_s)
    except ServeError as error:
        _log.error("cannot start: %s", error)
        environment.runner.log_exception("generator", f"cannot start: {error}", "")
        environment.process_exit_code = 2
        gevent.spawn(_finish, environment)
        return
    environment.open_loop = loop
    loop.ended.rawlink(lambda _: gevent.spawn(_finish, environment))


def _finish(environment: Any) -> None:
    """The run is over: leave, or with a web UI go back to its start page."""
    if environment.web_ui is None:
        environment.runner.quit()
    else:
        environment.runner.stop()


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def _summarise(environment: Any, **_: Any) -> None:
    loop = environment.open_loop
    if loop is not None:
        show_summary(loop.summary(), Console(stderr=True))
        environment.gnnserve_target.close()
