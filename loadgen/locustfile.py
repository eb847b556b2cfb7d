"""The open loop under Locust's own command and web UI: `locust -f loadgen/locustfile.py`.

One user in each process sends all requests, for `--duration` seconds or until `--requests` are
sent; with `--master` and `--worker` each worker sends a part of them. Failures in the statistics
are requests without an answer; with `--late-fails` also late answers. The tab `Lateness` has the
late answers as counted by the client and by the server.
"""

from loadgen import patched  # noqa: F401  isort: skip

import logging
import sys
from pathlib import Path
from typing import Any

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.runners import STATE_INIT, MasterRunner, WorkerRunner

from loadgen.lateness import Lateness, show_in
from loadgen.master import GreenDividedLoop, Master
from loadgen.native import refuse_unsendable
from loadgen.native_green import NativeGreenLoop
from loadgen.open_loop import OpenLoop
from loadgen.options import DATA_VARIABLE, DEFAULT_IDS, LoadOptions
from loadgen.plan import make_plan
from loadgen.show import show_summary
from loadgen.target import Target
from loadgen.users import Load
from loadgen.worker import attach
from serve.errors import ConfigError, ServeError
from serve.terminal import Console
from serve.workload import ARRIVALS, MIX, PoolSpec

_log = logging.getLogger(__name__)
_POOL = PoolSpec()


class OneUserEach(LoadTestShape):  # type: ignore[misc]
    """Shape of one user in each process until the run is over; Locust asks for no user count."""

    over = False
    _users = 1

    def tick(self) -> tuple[int, float] | None:
        """Return users and spawn rate; None to stop."""
        # Workers that come or go during a run change nothing about it.
        if isinstance(self.runner, MasterRunner) and self.runner.state == STATE_INIT:
            self._users = max(1, self.runner.worker_count)
        return None if self.over else (self._users, self._users)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: LocustArgumentParser) -> None:
    # The web UI shows only options added by this method, not those of groups. No default is None,
    # because the UI converts what is typed to the type of the default.
    add = parser.add_argument
    add("--workload", default=MIX, help="a model that the server has, or mix of all that are ready")
    add("--without", default="", help="models that mix leaves out, with commas between them")
    add("--rate", type=float, default=20.0, help="requests per second")
    add("--rho", type=float, default=0.0, help="offered load; 0 to use the rate")
    add("--end-to-end", action="store_true", help="with rho: measure solo times at the client")
    add("--duration", type=float, default=60.0, help="seconds of arrivals; 0 for no limit")
    add("--requests", type=int, default=0, help="requests to send; 0 for no limit")
    add("--arrivals", choices=list(ARRIVALS), default="poisson", help="arrival process")
    add(
        "--rate-profile",
        default="",
        help="how the rate changes, such as ramp:0-2; see gnnserve load",
    )
    add("--in-flight", type=int, default=0, help="requests to keep in flight; 0 to use the rate")
    add("--tenant", default="", help="tenants of the requests, with weights: a=3,b=1")
    add("--priority", type=int, default=0, help="priority of all requests; 0: the server's own")
    add("--target-ms", type=float, default=0.0, help="QoS target; 0: the server's own")
    add("--token-file", default="", help="[TENANT=]FILE with a token; several with commas")
    add("--ca", default="", help="PEM file of authorities to trust; encrypts")
    add("--seed", type=int, default=0, help="seed of tasks and arrivals")
    add("--trace", default="", help="trace to replay instead")
    add("--speed", type=float, default=1.0, help="how many times as fast to send the trace")
    add("--no-payloads", action="store_true", help="of a recording: random tensors of equal sizes")
    add("--scale", type=float, default=_POOL.scale, help="size of generated graphs")
    add("--max-nodes", type=int, default=_POOL.max_nodes, help="most nodes of a subgraph")
    add("--max-edges", type=int, default=_POOL.max_edges, help="most edges of a subgraph")
    add(
        "--data",
        env_var=DATA_VARIABLE,
        default="",
        help="file or folder of graphs; not for --graph",
    )
    add("--graph", default="", help="graph of the server to ask about by node ids; empty: none")
    add("--node-type", default="", help="type of the nodes, in a graph with several")
    add("--ids", default="", help=f"ids in a request: 16, or from 1-64; empty: {DEFAULT_IDS}")
    add("--fanouts", default="", help="fan-outs such as 10,5, or all; empty: the model's own")
    add("--timeout", type=float, default=30.0, help="time limit of a request, in seconds")
    add("--native", action="store_true", help="send from compiled code, over libnghttp2")
    add("--late-fails", action="store_true", help="count late answers as failures")
    _refuse_forks(parser)


def _refuse_forks(parser: LocustArgumentParser) -> None:
    """Exit with an explanation when Locust is to fork; it does so before it calls anything else."""
    arguments = [one for one in sys.argv[1:] if one not in ("-h", "--help", "-V", "--version")]
    given, _ = parser.parse_known_args(arguments)
    if given.processes:
        text = (
            "--processes forks, which gRPC does not survive: run `gnnserve load --web --workers N`,"
            " or start --master and each --worker"
        )
        Console(stderr=True).print_error(ConfigError(text))
        raise SystemExit(2)


@events.init.add_listener  # type: ignore[untyped-decorator]
def _set_up(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    environment.lateness = Lateness()
    environment.open_loop = None
    environment.on_sample = environment.lateness.add
    environment.gnnserve_master = None
    if isinstance(runner, WorkerRunner):
        attach(environment)
    elif isinstance(runner, MasterRunner):
        master = environment.gnnserve_master = Master(runner, environment.lateness.add)
        # Each worker has its user then, and Locust counts the run as running.
        environment.events.spawning_complete.add_listener(lambda **_: master.begin())
    if web_ui is not None:
        show_in(web_ui, environment.lateness)


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _prepare(environment: Any, **_: Any) -> None:
    """Make the run's plan from the options of the web UI or the command line."""
    Load.late_is_failure = environment.parsed_options.late_fails
    if isinstance(environment.runner, WorkerRunner):
        return
    shape = environment.shape_class
    environment.open_loop = None
    environment.lateness.clear()
    try:
        options = _options(environment)
        options.check()
        if environment.parsed_options.native:
            refuse_unsendable(options)
        loop = _loop(environment, options)
    except ServeError as error:
        _log.error("cannot start: %s", error)
        environment.runner.log_exception("generator", f"cannot start: {error}", "")
        environment.process_exit_code = 2
        shape.over = True
        return
    environment.open_loop = loop
    loop.ended.rawlink(lambda _: setattr(shape, "over", loop is environment.open_loop))


def _loop(environment: Any, options: LoadOptions) -> OpenLoop | NativeGreenLoop | GreenDividedLoop:
    native: bool = environment.parsed_options.native
    master: Master | None = environment.gnnserve_master
    target = Target(options.target, options.tokens(), options.ca)
    environment.gnnserve_target = target
    plan = make_plan(options, target, encoded=master is None)
    if master is not None:
        return master.prepare(plan, options, native=native)
    if native:
        return NativeGreenLoop(plan, options.target, options.timeout_s)
    return OpenLoop(plan, target, options.timeout_s)


def _options(environment: Any) -> LoadOptions:
    given = environment.parsed_options
    replays = bool(given.trace)
    return LoadOptions(
        target=(environment.host or "").removeprefix("http://").rstrip("/"),
        workload=given.workload,
        without=tuple(name.strip() for name in given.without.split(",") if name.strip()),
        rate_hz=None if replays or given.rho or given.in_flight else given.rate,
        rho=None if replays else given.rho or None,
        in_flight=given.in_flight or None,
        profile=given.rate_profile,
        tenant=given.tenant,
        priority=given.priority,
        target_ms=given.target_ms or None,
        token_files=tuple(name for name in given.token_file.split(",") if name),
        ca=Path(given.ca) if given.ca else None,
        speed=given.speed,
        payloads=not given.no_payloads,
        end_to_end=given.end_to_end,
        duration_s=given.duration or None,
        requests=given.requests or None,
        arrivals=given.arrivals,
        seed=given.seed,
        graph=given.graph,
        node_type=given.node_type,
        ids=given.ids,
        fanouts=given.fanouts,
        pool=PoolSpec(scale=given.scale, max_nodes=given.max_nodes, max_edges=given.max_edges),
        data=Path(given.data) if given.data else None,
        trace=Path(given.trace) if replays else None,
        timeout_s=given.timeout,
    )


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def _summarise(environment: Any, **_: Any) -> None:
    environment.shape_class.over = False
    if isinstance(environment.runner, WorkerRunner):
        return
    if environment.gnnserve_master is not None:
        environment.gnnserve_master.settle()
    environment.lateness.series.end()
    loop = environment.open_loop
    if loop is not None:
        show_summary(loop.summary(), Console(stderr=True))
        environment.gnnserve_target.close()
