"""The `gnnserve` command: argv and environment end here, nothing below reads them.

Exit codes: 0 done, 1 something went wrong while running, 2 the configuration or the arguments
are wrong and nothing was started. Data goes to stdout, everything about it to stderr.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.table import Table
from rich.text import Text

import serve
from serve.config import load_config
from serve.core.disciplines import DISCIPLINES
from serve.core.policies import POLICIES
from serve.errors import ConfigError, ServeError
from serve.resources import configs_path
from serve.scratch import temporary_folder
from serve.server.api import ModelEstimate
from serve.sim.report import SimReport
from serve.steps import Steps
from serve.terminal import Console

app = typer.Typer(
    help="An inference server for graph neural networks that keeps a promise per request.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_errors = Console(stderr=True)

ConfigOption = Annotated[Path, typer.Option("--config", help="Configuration file (TOML).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def main() -> None:
    """Entry point of `gnnserve`."""
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
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(serve.__version__)
        raise typer.Exit


@app.command("serve")
def serve_command(
    config: ConfigOption,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Instead of the configured one; 0: any.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="The same for metrics and report.")
    ] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; prints `ready` on stdout once warmed up."""
    from serve.app import Application
    from serve.obs.log import setup_logging

    loaded = load_config(config)
    ports = {
        name: port
        for name, port in (("grpc_port", grpc_port), ("http_port", http_port))
        if port is not None
    }
    server = msgspec.structs.replace(loaded.server, **ports)
    setup_logging(level=_log_level())
    application = Application(msgspec.structs.replace(loaded, server=server))
    with Steps(_errors) as steps:

        def ready(grpc_port: int, http_port: int) -> None:
            steps.close()
            if _errors.is_terminal:
                _errors.print(
                    Text.assemble(
                        "gRPC on ",
                        (f"{server.host}:{grpc_port}", "bold"),
                        ", metrics and report on ",
                        (f"http://{server.host}:{http_port}/report", "bold"),
                        "; Ctrl-C drains and stops",
                    )
                )
            print("ready", flush=True)  # noqa: T201  the contract's word, on stdout

        application.run(ready, steps.tell)


@app.command()
def check(
    config: ConfigOption,
    fast: Annotated[
        bool, typer.Option("--fast", help="Read files only: bind no port, build no model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find everything that would keep a server of this configuration from serving.

    Tries the addresses, and builds every model and runs it on a small graph. Exit code 2 when there
    is an error; each is told with its file and key.
    """
    from serve.check import check as find_mistakes
    from serve.obs.log import setup_logging

    # What goes wrong is told once, by the check.
    setup_logging(level="CRITICAL")
    with Steps(_errors) as steps:
        found = find_mistakes(config, steps.tell, fast=fast)
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        for severity, lines in (("error", found.errors), ("warning", found.warnings)):
            for line in lines:
                typer.echo(f"{severity}: {line}", err=True)
        if not found.errors:
            typer.echo("\n".join([*found.fine, f"{config}: ok"]))
    raise typer.Exit(2 if found.errors else 0)


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(help="Name of a model in the repository.")],
    config: ConfigOption,
    nodes: Annotated[int | None, typer.Option(min=0, help="Nodes of the request's graph.")] = None,
    edges: Annotated[int | None, typer.Option(min=0, help="Edges of the request's graph.")] = None,
    graph: Annotated[
        str | None, typer.Option(help="Instead: a resident graph, asked by node ids.")
    ] = None,
    node_ids: Annotated[int | None, typer.Option(min=0, help="How many of its nodes.")] = None,
    fanouts: Annotated[
        str | None, typer.Option(help="In-neighbours drawn at each hop, as 10,5; or all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What a request would need: memory, solo time, QoS target.

    Its size is given by --nodes and --edges, or expected from --graph and --node-ids.
    """
    from serve.app import estimate_offline, estimate_sample_offline
    from serve.obs.log import setup_logging

    setup_logging(level=_log_level("WARNING"))
    loaded = load_config(config)
    with Steps(_errors) as steps:
        if graph is None and nodes is not None and edges is not None:
            if node_ids is not None or fanouts is not None:
                raise ConfigError("--node-ids and --fanouts need a --graph")
            found = estimate_offline(loaded, model, nodes, edges, steps.tell)
        elif graph is not None and node_ids is not None:
            if nodes is not None or edges is not None:
                raise ConfigError("--graph and --node-ids say the size: no --nodes, no --edges")
            found = estimate_sample_offline(loaded, model, graph, node_ids, fanouts, steps.tell)
        else:
            raise ConfigError("give --nodes and --edges, or --graph and --node-ids")
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        Console().print(_estimate_table(found))


@app.command()
def report(
    db: Annotated[Path, typer.Option("--db", help="Database of the server.")] = Path("gnnserve.db"),
    since: Annotated[str | None, typer.Option(help="Only the last 90s, 10m, 2h, 1d.")] = None,
    as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every request as a row.")] = None,
) -> None:
    """Which targets were met, which were missed, and why."""
    from serve.obs.cli_report import run_report
    from serve.obs.duration import parse_duration

    since_s = None if since is None else parse_duration(since)
    raise typer.Exit(run_report(db, since_s, as_json, html, csv))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def load(context: typer.Context) -> None:
    """Send an open-loop load with Locust; `gnnserve load --help` lists the options."""
    # A process of its own: gevent replaces the sockets and threads of the one it runs in.
    command = [sys.executable, "-m", "loadgen", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command("simulate")
def simulate_command(
    workload: Annotated[
        str | None, typer.Option(help="A model of the repository, or `mix` of all of them.")
    ] = None,
    rho: Annotated[float | None, typer.Option(min=0.001, help="Offered load.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(POLICIES)}; or a baseline: default, mps_base, mps_aggr."),
    ] = None,
    discipline: Annotated[str | None, typer.Option(help=f"{', '.join(DISCIPLINES)}.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of tasks and arrivals.")] = 0,
    devices: Annotated[int, typer.Option(min=1, help="So many like this machine's.")] = 1,
    config: Annotated[
        Path | None, typer.Option("--config", help="Other models than the demo's.")
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="Replay a server's journal instead, also under another policy."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a workload on a virtual clock, with this machine's calibrated times.

    With --journal: check that the scheduler answers today as it did when the journal was written,
    then serve the recorded requests with their recorded times, under the recorded policy and
    discipline or those given. Exit code 1 when the answers differ.
    """
    from serve.app import replay_journal, simulate_workload
    from serve.obs.log import setup_logging

    setup_logging(level=_log_level("WARNING"))
    if journal is not None:
        if workload is not None or rho is not None:
            raise ConfigError("a journal has its own requests: give no --workload and no --rho")
        difference, found, title = replay_journal(journal, policy, discipline)
        if difference:
            text = Text.assemble(("not the same:", "yellow"), f" {difference}")
            _errors.print(text, soft_wrap=True)
        elif not as_json:
            typer.echo("every command is the same as recorded")
        _print_simulation(found, title, as_json)
        raise typer.Exit(1 if difference else 0)
    for name, value in (("workload", workload), ("rho", rho), ("policy", policy),
                        ("discipline", discipline)):  # fmt: skip
        if value is None:
            raise ConfigError(f"--{name} is missing; only a --journal has its own")
    assert workload is not None
    assert rho is not None
    assert policy is not None
    assert discipline is not None
    loaded = load_config(config or configs_path() / "dev.toml")
    with Steps(_errors) as steps:
        found = simulate_workload(
            loaded,
            workload,
            rho,
            policy=policy,
            discipline=discipline,
            requests=requests,
            seed=seed,
            devices=devices,
            progress=steps.tell,
        )
    _print_simulation(found, f"{workload} at ρ {rho:g}: {policy}/{discipline}", as_json)


def _print_simulation(found: SimReport, title: str, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(found))
    else:
        Console().print(_simulation_table(found, title))


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where its files go.")] = Path("demo"),
    duration: Annotated[float, typer.Option(min=1, help="Seconds of load.")] = 15.0,
) -> None:
    """Server, load and report in one go."""
    from serve.demo import run_demo

    raise typer.Exit(run_demo(folder, duration))


def _log_level(default: str = "INFO") -> str:
    """`GNNSERVE_LOG`, the one variable read; raises ConfigError on an unknown level."""
    level = os.environ.get("GNNSERVE_LOG", default).upper()
    if level not in _LOG_LEVELS:
        raise ConfigError(f"GNNSERVE_LOG: '{level}' is not one of {', '.join(_LOG_LEVELS)}")
    return level


def _estimate_table(found: ModelEstimate) -> Table:
    size = f"{found.num_nodes:,} nodes, {found.num_edges:,} edges"
    asked, sampled, drawn, of = size, "", "", "inputs included"
    if (sample := found.sample) is not None:
        asked = f"{sample.num_ids:,} nodes of graph {sample.graph}"
        hops = ", ".join("all" if fanout == -1 else str(fanout) for fanout in sample.fanouts)
        high = sample.size
        sampled = f"{size}; 95 % within {high.num_nodes_high:,} and {high.num_edges_high:,}"
        drawn = f"in {_milliseconds(high.prepare_ns)}, {hops} neighbours a hop"
        of += ", of the larger"
    margin_bytes = found.reserve_bytes - found.peak_bytes - found.workspace_bytes
    margin_bytes -= found.output_bytes
    table = Table(
        title=f"{found.model} version {found.version}: {asked}",
        show_header=False,
        title_justify="left",
    )
    rows = (
        ("executor", found.executor),
        ("expected sample", sampled),
        ("sampled", drawn),
        ("weights, held once", _size(found.weights_bytes)),
        ("inputs", _size(found.input_bytes)),
        ("peak memory (PMC)", f"{_size(found.peak_bytes)}, {of}"),
        ("held at the peak by", found.peak_where),
        ("kernels besides", _size(found.workspace_bytes) if found.workspace_bytes else ""),
        ("margin, answer", f"{_size(margin_bytes)}, {_size(found.output_bytes)}"),
        ("reserved", _size(found.reserve_bytes)),
        ("fit at once", f"{found.fit_count:,} in {_size(found.budget_bytes)}"),
        ("run time", _milliseconds(found.run_ns)),
        ("solo time", f"{_milliseconds(found.solo_ns)}, 95 % within "
                      f"{_milliseconds(found.solo_high_ns)}"),
        ("QoS target", _milliseconds(found.qos_target_ns)),
        ("warning", found.warning),
    )  # fmt: skip
    for name, value in rows:
        if value:
            table.add_row(name, value)
    return table


def _simulation_table(found: SimReport, title: str) -> Table:
    table = Table(title=f"{title}, simulated", show_header=False, title_justify="left")
    over_qt = (found.latency_over_qt_p50, found.latency_over_qt_p90, found.latency_over_qt_p99)
    late = ", ".join(f"{cause} {count}" for cause, count in found.by_cause.items() if count)
    rows = (
        ("requests", f"{found.requests:,}, {found.completed:,} with a result"),
        ("late", f"{found.violations:,}, {found.violation_rate:.2%}"),
        ("late because of", late),
        ("latency ÷ target p50, p90, p99", ", ".join(f"{value:.2f}" for value in over_qt)),
        ("JCT ÷ target, mean", f"{found.jct_over_qt_mean:.3f}"),
        ("QUET ÷ target, mean", f"{found.quet_over_qt_mean:.3f}"),
    )
    for name, value in rows:
        if value:
            table.add_row(name, value)
    return table


def _size(size_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:,.2f} {unit}"
    return f"{size_bytes} B"


def _milliseconds(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.2f} ms"
