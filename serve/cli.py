"""The `gnnserve` command line. Nothing below this module reads argv.

Exit codes: 0 success; 1 a failure while running; 2 a wrong configuration or wrong arguments, with
nothing started; 130 ended by Ctrl-C. `_EXIT_CODES` tells users. Data goes to stdout; progress,
warnings and errors go to stderr.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer
from rich.text import Text

import serve
from serve.collector import imports_uncollected
from serve.commands import (
    calibrate_cli,
    cluster_cli,
    database_cli,
    graph_cli,
    model_cli,
    token_cli,
    train_cli,
)
from serve.commands.options import CONFIG_PATH, ConfigOption, SetOption
from serve.commands.steps import Steps
from serve.config import Config, effective_values, load_config
from serve.config_schema import schema, values_table
from serve.config_settings import Setting, settings_of
from serve.core.disciplines import DISCIPLINES
from serve.core.policies import POLICIES
from serve.errors import ConfigError, InvalidInput, Mismatch, ServeError, UnknownName
from serve.resources import configs_path
from serve.scratch import temporary_folder
from serve.sim.workload import BASELINES
from serve.terminal import Console
from serve.workload import PoolSpec

if TYPE_CHECKING:
    from serve.server.api import ModelEstimate
    from serve.server.training.job_facts import TrainingEstimate

#: The graphs of a simulated workload, unless others are asked for.
_POOL = PoolSpec()

_EXIT_CODES = (
    "Exit codes: 0 done; 1 it failed on the way; 2 wrong arguments, configuration or files, and"
    " nothing was begun; 130 ended by Ctrl-C. `serve` and `load` have more."
)
app = typer.Typer(
    epilog=_EXIT_CODES,
    help="An inference server for graph neural networks that keeps a promise per request.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show the configuration, or the schema of its file.")
app.add_typer(config_app, name="config", no_args_is_help=True)
model_cli.add_to(app)
app.add_typer(calibrate_cli.app, name="calibrate", no_args_is_help=True)
app.add_typer(cluster_cli.app, name="cluster", no_args_is_help=True)
app.add_typer(database_cli.app, name="db", no_args_is_help=True)
app.add_typer(graph_cli.app, name="graph", no_args_is_help=True)
app.add_typer(token_cli.app, name="token", no_args_is_help=True)
app.add_typer(train_cli.app, name="job", no_args_is_help=True)
app.command("train")(train_cli.train_command)
_errors = Console(stderr=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def main() -> None:
    """Run the command in argv and end the process with its exit code."""
    try:
        with temporary_folder():
            app()
    except ConfigError as error:
        _fail(error, 2)
    except ServeError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _fail(error: Exception, code: int) -> NoReturn:
    _errors.print_error(error)
    raise SystemExit(code)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(serve.__version__)
        raise typer.Exit


@app.command("serve")
def serve_command(
    config: ConfigOption = CONFIG_PATH,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Listen for gRPC here, not on the configured port; 0: any free."
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The same for HTTP: metrics, health and report."),
    ] = None,
    settings: SetOption = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. Prints `ready` on stdout once warmed up."""
    from serve.commands.tuning import tune_process
    from serve.obs.log import log_uncaught, setup_logging
    from serve.server.lanes.processes import fork_server

    ports = (("grpc_port", grpc_port), ("http_port", http_port))
    given = [f"server.{name}={port}" for name, port in ports if port is not None]

    def read() -> Config:
        return load_config(config, _settings([*(settings or ()), *given]))

    loaded = read()
    setup_logging(loaded.log.format, level=_log_level(loaded.log.level))
    log_uncaught()
    tune_process()
    # It imports torch, which takes longest, while this process imports the rest of the server.
    with fork_server():
        with imports_uncollected():
            from serve.commands.serve import Application, addresses, spare_stdout
        application = Application(loaded, environment=os.environ, read_again=read)
        with Steps(_errors) as steps, spare_stdout(application.printed) as say_ready:

            def ready(grpc_port: int, http_port: int) -> None:
                steps.close()
                if _errors.is_terminal:
                    _errors.print(addresses(loaded.server.host, grpc_port, http_port))
                say_ready()

            application.run(ready, steps.tell)


@app.command()
def check(
    config: ConfigOption = CONFIG_PATH,
    fast: Annotated[
        bool, typer.Option("--fast", help="Only read files: bind no port, build no model.")
    ] = False,
    as_json: JsonOption = False,
    settings: SetOption = None,
) -> None:
    """Find every error that would keep a server with this configuration from serving.

    Binds the ports, and builds every model and runs it on a small graph. Each error names its file
    and key. The exit code is 2 when there is one.
    """
    from serve.commands.check import check_config, print_findings
    from serve.obs.log import setup_logging

    # The check reports each problem once; a log would repeat it.
    setup_logging(level="CRITICAL")
    with Steps(_errors) as steps:
        found = check_config(config, steps.tell, settings=_settings(settings), fast=fast)
    print_findings(found, config, as_json)
    raise typer.Exit(2 if found.errors else 0)


@config_app.command("show")
def config_show(
    config: ConfigOption = CONFIG_PATH, as_json: JsonOption = False, settings: SetOption = None
) -> None:
    """Show every key as the server reads it, and where its value comes from."""
    values = effective_values(config, _settings(settings))
    if as_json:
        typer.echo(msgspec.json.encode(values))
    else:
        Console().print(values_table(values))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the configuration file, for editors and linters."""
    typer.echo(json.dumps(schema(), indent=2))


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(help="A model of the repository, by name.")],
    config: ConfigOption = CONFIG_PATH,
    nodes: Annotated[int | None, typer.Option(min=0, help="Nodes of the request's graph.")] = None,
    edges: Annotated[int | None, typer.Option(min=0, help="Edges of the request's graph.")] = None,
    graph: Annotated[
        str | None, typer.Option(help="A resident graph, for a request by node ids.")
    ] = None,
    node_ids: Annotated[
        int | None, typer.Option(min=0, help="The number of node ids in the request.")
    ] = None,
    node_type: Annotated[
        str | None, typer.Option(help="The type of the node ids, in a graph with several.")
    ] = None,
    fanouts: Annotated[
        str | None,
        typer.Option(help="In-neighbours to sample at each hop, such as 10,5; or all."),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="A training step on a whole graph, not a request.")
    ] = False,
    as_json: JsonOption = False,
    settings: SetOption = None,
) -> None:
    """Estimate the memory, solo time and QoS target of one request.

    Give its size with --nodes and --edges. For a request by node ids give --graph and --node-ids;
    its size is then that of an expected sample. With --train, --nodes and --edges, estimate the
    memory of a training step on such a graph.
    """
    from serve.commands.estimate import (
        estimate_offline,
        estimate_sample_offline,
        estimate_training_offline,
        table_of,
    )
    from serve.obs.log import setup_logging

    setup_logging(level=_log_level("WARNING"))
    loaded = load_config(config, _settings(settings))
    found: ModelEstimate | TrainingEstimate
    with Steps(_errors) as steps, _wrong_arguments():
        if graph is None and nodes is not None and edges is not None:
            if (node_ids, fanouts, node_type) != (None, None, None):
                raise ConfigError("--node-ids, --node-type and --fanouts need --graph")
            if train:
                found = estimate_training_offline(loaded, model, nodes, edges, steps.tell)
            else:
                found = estimate_offline(loaded, model, nodes, edges, steps.tell)
        elif graph is not None and node_ids is not None and not train:
            if nodes is not None or edges is not None:
                raise ConfigError("--nodes and --edges do not go with --graph")
            found = estimate_sample_offline(
                loaded, model, graph, node_ids, fanouts, steps.tell, node_type
            )
        else:
            others = "" if train else ", or --graph and --node-ids"
            raise ConfigError(f"give --nodes and --edges{others}")
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        Console().print(table_of(found))


@app.command()
def report(
    databases: Annotated[
        list[Path] | None,
        typer.Argument(help="Databases of several servers, for one report.", metavar="DATABASE"),
    ] = None,
    db: Annotated[Path, typer.Option("--db", help="The server's database.")] = Path("gnnserve.db"),
    machine: Annotated[str, typer.Option(help="Only this one of several databases.")] = "",
    since: Annotated[str, typer.Option(help="Only the last 90s, 10m, 2h or 1d.")] = "",
    from_time: Annotated[
        str, typer.Option("--from", help="Only from 2026-01-31T08:00 on; UTC, or with a zone.")
    ] = "",
    until: Annotated[str, typer.Option(help="Only before this time.")] = "",
    model: Annotated[str, typer.Option(help="Only this model.")] = "",
    version: Annotated[str, typer.Option(help="Only this version.")] = "",
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    client: Annotated[str, typer.Option(help="Only this id that a client sent.")] = "",
    cause: Annotated[str, typer.Option(help="Only answers late for this cause.")] = "",
    as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page here.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row for every request here.")] = None,
) -> None:
    """Report which requests met their targets, which missed them, and why."""
    from serve.obs.cli_report import run_report
    from serve.obs.selection import selection_of

    filters = {
        "since": since, "from": from_time, "until": until, "model": model, "version": version,
        "tenant": tenant, "client": client, "cause": cause,
    }  # fmt: skip
    run_report(
        *(databases or [db]), chosen=selection_of(filters), machine=machine, as_json=as_json,
        html=html, csv=csv,
    )  # fmt: skip


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def load(context: typer.Context) -> None:
    """Send an open-loop load with Locust; `gnnserve load --help` lists the options."""
    # In a process of its own, as gevent replaces the sockets and threads of the one it runs in.
    command = [sys.executable, "-P", "-m", "loadgen", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command("simulate")
def simulate_command(
    workload: Annotated[
        str | None, typer.Option(help="A model of the repository, or `mix` for all of them.")
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option(min=0.001, help="Offered load: arrival rate × mean solo time ÷ slots."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(POLICIES)}; or a baseline, which has a discipline of its own: "
            f"{', '.join(BASELINES)}. Default: the configuration's."
        ),
    ] = None,
    discipline: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(DISCIPLINES)}. Default: the configuration's."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="The number of requests.")] = 1000,
    seed: Annotated[int, typer.Option(help="The seed of tasks and arrival times.")] = 0,
    scale: Annotated[
        float, typer.Option(help="The size of generated graphs relative to the real ones.")
    ] = _POOL.scale,
    max_nodes: Annotated[
        int, typer.Option(min=1, help="The most nodes of a graph.")
    ] = _POOL.max_nodes,
    max_edges: Annotated[
        int, typer.Option(min=0, help="The most edges of a graph.")
    ] = _POOL.max_edges,
    devices: Annotated[
        int, typer.Option(min=1, help="The number of devices like this machine's.")
    ] = 1,
    machines: Annotated[
        int, typer.Option(min=1, help="The number of servers, behind one front.")
    ] = 1,
    front: Annotated[
        str,
        typer.Option(help="How it chooses a server: in_time, load, count, work, end or random."),
    ] = "in_time",
    config: Annotated[
        Path | None,
        typer.Option("--config", help="The configuration file; without it, the demo's models."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="Replay this journal of a server instead of a workload."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            "--trace",
            help="Serve this trace, or recording of a server, instead of a workload.",
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="How many times as fast to serve the --replay.")
    ] = 1.0,
    as_json: JsonOption = False,
    settings: SetOption = None,
) -> None:
    """Serve a workload on a virtual clock, with this machine's calibrated times.

    With --journal, first check that today's scheduler gives the recorded commands. Then serve the
    recorded requests with their recorded times, under the recorded policy and discipline unless
    others are given. The exit code is 1 when a command differs.

    With --replay, serve the requests of a server's recording (report.record) or of a trace, with
    times as calibrated here, under the policy and discipline of the configuration unless others
    are given.
    """
    from serve.commands.simulate import (
        print_simulation,
        replay_journal,
        simulate_replay,
        simulate_workload,
    )
    from serve.obs.log import setup_logging

    setup_logging(level=_log_level("WARNING"))
    if journal is not None:
        if workload is not None or rho is not None or replay is not None:
            raise ConfigError(
                "--workload, --rho and --replay do not go with --journal, which has requests"
            )
        if machines > 1:
            raise ConfigError("--machines does not go with --journal, which is of one server")
        difference, found, title = replay_journal(journal, policy, discipline)
        if difference:
            text = Text.assemble(("the commands differ:", "yellow"), f" {difference}")
            _errors.print(text, soft_wrap=True)
        elif not as_json:
            typer.echo("every command is the same as recorded")
        print_simulation(found, title, as_json)
        raise typer.Exit(1 if difference else 0)
    if replay is not None:
        if workload is not None or rho is not None:
            raise ConfigError("--workload and --rho do not go with --replay, which has requests")
        loaded = load_config(config or configs_path() / "dev.toml", _settings(settings))
        with Steps(_errors) as steps:
            found, title = simulate_replay(
                loaded,
                replay,
                speed,
                policy=policy,
                discipline=discipline,
                devices=devices,
                machines=machines,
                front=front,
                progress=steps.tell,
            )
        print_simulation(found, title, as_json)
        return
    if workload is None or rho is None:
        name = "workload" if workload is None else "rho"
        raise ConfigError(f"--{name} is missing; give it, --replay or --journal")
    loaded = load_config(config or configs_path() / "dev.toml", _settings(settings))
    with Steps(_errors) as steps:
        found, title = simulate_workload(
            loaded,
            workload,
            rho,
            policy=policy,
            discipline=discipline,
            requests=requests,
            seed=seed,
            pool=PoolSpec(scale=scale, max_nodes=max_nodes, max_edges=max_edges),
            devices=devices,
            machines=machines,
            front=front,
            progress=steps.tell,
        )
    print_simulation(found, title, as_json)


@app.command()
def front(
    server: Annotated[
        list[str] | None, typer.Option(help="A server's host:port; once for each.")
    ] = None,
    servers_file: Annotated[
        Path | None,
        typer.Option(help="Instead a file with a host:port in each line, read when it changes."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="A file with a key, by which servers believe when a request came here."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
) -> None:
    """Stand before several servers of the same models: one gRPC address for any client.

    Each request goes to the server that has the fewest. Servers that end, freeze, stop or are not
    ready get none. Prints `ready` once a server gets requests, and runs until a signal.
    """
    from serve.commands.front import run_front

    run_front(host, port, server or (), servers_file, key_file, lambda: typer.echo("ready"))


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="The folder for its files.")] = Path("demo"),
    duration: Annotated[float, typer.Option(min=1, help="Seconds of load.")] = 15.0,
) -> None:
    """Start a server on the demo models, send requests and a load, and show the report."""
    from serve.commands.demo import run_demo

    run_demo(folder, duration)


def _settings(arguments: list[str] | None) -> tuple[Setting, ...]:
    return settings_of(os.environ, arguments or ())


@contextmanager
def _wrong_arguments() -> Iterator[None]:
    """Take a name that is not there, or a value that is none, for a wrong argument."""
    try:
        yield
    except (InvalidInput, UnknownName, Mismatch) as error:
        raise ConfigError(str(error)) from error


def _log_level(default: str = "INFO") -> str:
    """Return `GNNSERVE_LOG`; raises ConfigError if it is no level."""
    level = os.environ.get("GNNSERVE_LOG", default).upper()
    if level not in _LOG_LEVELS:
        raise ConfigError(f"GNNSERVE_LOG: '{level}' is not one of {', '.join(_LOG_LEVELS)}")
    return level
