"""`gnnserve load`, as a process of its own: gevent replaces the sockets and threads of this one.

Exit codes: 0 at least one answer came, 1 none did or the server is not there, 2 the arguments are
wrong. Data goes to stdout, everything about it to stderr.
"""

from loadgen import patched  # noqa: F401  isort: skip

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from loadgen.open_loop import OpenLoop
from loadgen.options import LoadOptions
from loadgen.run import run_load
from loadgen.show import progress_line, show_summary
from serve.errors import ConfigError, ServeError
from serve.terminal import Console
from serve.workload import MIX, PoolSpec

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_POOL = PoolSpec()
_errors = Console(stderr=True)


@app.command()
def load(
    target: Annotated[str, typer.Option(help="HOST:PORT of the server's gRPC port.")],
    workload: Annotated[
        str, typer.Option(help="A model that the server has, or `mix` of all that are ready.")
    ] = MIX,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    rho: Annotated[
        float | None,
        typer.Option(help="Offered load: rate × mean solo time ÷ lanes, by the server's word."),
    ] = None,
    end_to_end: Annotated[
        bool,
        typer.Option(
            "--end-to-end",
            help="With --rho: measure solo times from here, transport and this generator included; "
            "for a server on the same machine.",
        ),
    ] = False,
    duration: Annotated[float | None, typer.Option(help="Seconds of arrivals.")] = None,
    requests: Annotated[int | None, typer.Option(help="End after so many requests.")] = None,
    arrivals: Annotated[
        Literal["poisson", "bursty"], typer.Option(help="Arrival process.")
    ] = "poisson",
    seed: Annotated[int, typer.Option(help="Of tasks and arrivals.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace.")] = None,
    save_trace: Annotated[Path | None, typer.Option(help="Write the trace sent.")] = None,
    scale: Annotated[
        float, typer.Option(help="Of generated graphs against the real ones' sizes.")
    ] = _POOL.scale,
    max_nodes: Annotated[int, typer.Option(help="Largest subgraph.")] = _POOL.max_nodes,
    max_edges: Annotated[int, typer.Option(help="Most edges of one.")] = _POOL.max_edges,
    data: Annotated[
        Path | None, typer.Option(envvar="GNNSERVE_DATA", help="Folder of real graphs (.npz).")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
) -> None:
    """Send requests at random times, whether or not earlier ones are answered (open loop)."""
    pool = PoolSpec(scale=scale, max_nodes=max_nodes, max_edges=max_edges)
    options = LoadOptions(
        target=target,
        workload=workload,
        rate_hz=rate,
        rho=rho,
        end_to_end=end_to_end,
        duration_s=duration,
        requests=requests,
        arrivals=arrivals,
        seed=seed,
        pool=pool,
        data=data,
        trace=trace,
        save_trace=save_trace,
        timeout_s=timeout,
    )
    if _errors.is_terminal:
        _errors.print(f"making graphs and requests for {target}", end="\r")
    summary = run_load(options, _tell if _errors.is_terminal else lambda _: None)
    if _errors.is_terminal:
        _errors.print(" " * _errors.width, end="\r")
    if as_json:
        typer.echo(msgspec.json.encode(summary))
    else:
        show_summary(summary, Console())
    if not summary.answered:
        raise typer.Exit(1)


def _tell(loop: OpenLoop) -> None:
    line = progress_line(loop.elapsed_s, loop.plan.trace, loop.sent, loop.samples)
    _errors.print(line.ljust(_errors.width)[: _errors.width - 1], end="\r")


def main() -> None:
    """Entry point; errors end here."""
    try:
        app(prog_name="gnnserve load")
    except ServeError as error:
        _errors.print_error(error)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
