"""Locust's own command and web UI for the open loop: `locust -f loadgen/locustfile.py`.

One user sends all requests, for `--duration` seconds or until `--requests` are sent. Failures in
the statistics are requests without an answer, and with `--late-fails` late answers as well; the tab
`Lateness` has both sides' count of late answers.
"""

from loadgen import patched  # noqa: F401  isort: skip

import logging
import sys
from pathlib import Path
from typing import Any

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser

from loadgen.lateness import Lateness, show_in
from loadgen.measure import Sample
from loadgen.open_loop import OpenLoop
from loadgen.options import LoadOptions
from loadgen.plan import make_plan
from loadgen.show import show_summary
from loadgen.target import Target
from loadgen.users import GraphUser
from serve.errors import ConfigError, ServeError
from serve.terminal import Console
from serve.workload import ARRIVALS, MIX, PoolSpec

_log = logging.getLogger(__name__)
_POOL = PoolSpec()


class Load(GraphUser):
    """The one user."""

    def report(self, sample: Sample) -> None:
        """Tell Locust and the tab of one request."""
        super().report(sample)
        self.environment.lateness.add(sample)


class OneUser(LoadTestShape):  # type: ignore[misc]
    """One user until the run is over: with a shape, Locust asks for no number of users."""

    over = False

    def reset_time(self) -> None:
        """A run begins."""
        super().reset_time()
        self.over = False

    def tick(self) -> tuple[int, float] | None:
        """Users and how many start a second; None: stop."""
        return None if self.over else (1, 1.0)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: LocustArgumentParser) -> None:
    # Only what this method adds is shown in the web UI; a group's is not. No default is None, as
    # what is typed there becomes of the default's type.
    add = parser.add_argument
    add("--workload", default=MIX, help="a model that the server has, or mix of all that are ready")
    add("--rate", type=float, default=20.0, help="requests per second")
    add("--rho", type=float, default=0.0, help="offered load; 0: use the rate")
    add("--end-to-end", action="store_true", help="with rho: measure solo times from here")
    add("--duration", type=float, default=60.0, help="seconds of arrivals; 0: as the requests say")
    add("--requests", type=int, default=0, help="end after so many; 0: as the duration says")
    add("--arrivals", choices=list(ARRIVALS), default="poisson", help="arrival process")
    add("--seed", type=int, default=0, help="of tasks and arrivals")
    add("--trace", default="", help="file to replay instead")
    add("--scale", type=float, default=_POOL.scale, help="of generated graphs")
    add("--max-nodes", type=int, default=_POOL.max_nodes, help="largest subgraph")
    add("--max-edges", type=int, default=_POOL.max_edges, help="most edges of one")
    add("--data", env_var="GNNSERVE_DATA", default="", help="real graphs' folder")
    add("--timeout", type=float, default=30.0, help="seconds until a request is given up")
    add("--late-fails", action="store_true", help="count late answers as failures")
    _refuse_workers(parser)


def _refuse_workers(parser: LocustArgumentParser) -> None:
    """End, with a sentence, a run of several processes.

    Here, because Locust forks, or waits for its master, before anything else of ours is called.
    """
    arguments = [one for one in sys.argv[1:] if one not in ("-h", "--help", "-V", "--version")]
    given, _ = parser.parse_known_args(arguments)
    if given.master or given.worker or given.processes:
        text = (
            "one process sends an open loop: run without --master, --worker and --processes, or "
            "start several runs that each send a part of the rate"
        )
        Console(stderr=True).print_error(ConfigError(text))
        raise SystemExit(2)


@events.init.add_listener  # type: ignore[untyped-decorator]
def _add_tab(environment: Any, web_ui: Any, **_: Any) -> None:
    environment.lateness = Lateness()
    if web_ui is not None:
        show_in(web_ui, environment.lateness)


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _prepare(environment: Any, **_: Any) -> None:
    """Make the run's plan from what was typed into the UI or the command line."""
    shape = environment.shape_class
    environment.open_loop = None
    environment.lateness.clear()
    try:
        options = _options(environment)
        target = environment.gnnserve_target = Target(options.target)
        loop = OpenLoop(make_plan(options, target), target, options.timeout_s)
    except ServeError as error:
        _log.error("cannot start: %s", error)
        environment.runner.log_exception("generator", f"cannot start: {error}", "")
        environment.process_exit_code = 2
        shape.over = True
        return
    environment.open_loop = loop
    loop.ended.rawlink(lambda _: setattr(shape, "over", True))


def _options(environment: Any) -> LoadOptions:
    given = environment.parsed_options
    Load.late_is_failure = given.late_fails
    replays = bool(given.trace)
    return LoadOptions(
        target=(environment.host or "").removeprefix("http://").rstrip("/"),
        workload=given.workload,
        rate_hz=None if replays or given.rho else given.rate,
        rho=None if replays else given.rho or None,
        end_to_end=given.end_to_end,
        duration_s=given.duration or None,
        requests=given.requests or None,
        arrivals=given.arrivals,
        seed=given.seed,
        pool=PoolSpec(scale=given.scale, max_nodes=given.max_nodes, max_edges=given.max_edges),
        data=Path(given.data) if given.data else None,
        trace=Path(given.trace) if replays else None,
        timeout_s=given.timeout,
    )


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def _summarise(environment: Any, **_: Any) -> None:
    loop = environment.open_loop
    if loop is not None:
        show_summary(loop.summary(), Console(stderr=True))
        environment.gnnserve_target.close()
