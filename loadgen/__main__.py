"""`gnnserve load`, a process of its own because gevent replaces its sockets and threads.

Exit codes: 0 after at least one answer, 1 without an answer or a server, 2 for wrong arguments, 3
when a condition of `--fail-if` holds.
Results go to standard output, progress and errors to standard error.
"""

import itertools
import os
import sys

# Before any module that opens a channel; the compiled sender needs real threads, unless workers
# have it.
if "--native" not in sys.argv or any(
    one.partition("=")[0] in ("--workers", "--worker") for one in sys.argv
):
    from loadgen import patched  # noqa: F401

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from loadgen.hdr import write_hdr
from loadgen.loop import Loop
from loadgen.measure import LoadSummary
from loadgen.options import DATA_VARIABLE, DEFAULT_IDS, LoadOptions, address, require_writable
from loadgen.page import write_page
from loadgen.rows import write_rows
from loadgen.show import progress_line, show_summary
from loadgen.verdict import FIGURES, Condition, TriedRate, find_limit
from loadgen.web import locust_command
from serve.errors import ConfigError, ServeError
from serve.terminal import Console
from serve.workload import MIX, PoolSpec

Run = Callable[[LoadOptions, Callable[[Loop], None]], Loop]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_POOL = PoolSpec()
_errors = Console(stderr=True)


@app.command()
def load(
    target: Annotated[str, typer.Option(help="HOST:PORT of the server's gRPC port.")] = "",
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            "--model",
            help="A model that the server has, `mix` of all that are ready, or weights, as in "
            "gcn=3,sage=1.",
        ),
    ] = MIX,
    without: Annotated[
        list[str] | None, typer.Option(help="A model that `mix` leaves out; may be repeated.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    rho: Annotated[
        float | None,
        typer.Option(help="Offered load: rate × mean solo time ÷ slots, as the server estimates."),
    ] = None,
    end_to_end: Annotated[
        bool,
        typer.Option(
            "--end-to-end",
            help="With --rho: measure solo times at the client, which includes transport and this "
            "generator; for a server on the same machine.",
        ),
    ] = False,
    duration: Annotated[float | None, typer.Option(help="Seconds of arrivals.")] = None,
    requests: Annotated[int | None, typer.Option(help="Number of requests to send.")] = None,
    arrivals: Annotated[
        Literal["poisson", "bursty", "even"], typer.Option(help="Arrival process.")
    ] = "poisson",
    profile: Annotated[
        str,
        typer.Option(
            "--rate-profile",
            help="How the rate changes over --duration: ramp:0-2, steps:0.5,1,2, spikes:5,2,30 "
            "(5 × for 2 s every 30 s), diurnal:0.2-1.8,60; multiples of the rate.",
        ),
    ] = "",
    in_flight: Annotated[
        int | None,
        typer.Option(help="Keep so many requests in flight (closed loop), instead of a rate."),
    ] = None,
    tenant: Annotated[
        str, typer.Option(help="Tenants of the requests, with weights: a=3,b=1.")
    ] = "",
    priority: Annotated[int, typer.Option(help="Priority of all requests; 1 is the highest.")] = 0,
    target_ms: Annotated[
        float | None, typer.Option(help="QoS target of all requests, not the server's own.")
    ] = None,
    token_file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TENANT=]FILE", help="File with a token to send; may be repeated by tenant."
        ),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file of authorities to trust; encrypts.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of tasks and arrivals.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", "--replay", help="Trace, or a server's recording (report.record), to replay."
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(help="How many times as fast to send a trace or recording.")
    ] = 1.0,
    payloads: Annotated[
        bool,
        typer.Option(help="Send recorded requests with the payloads that lie beside them."),
    ] = True,
    save_trace: Annotated[Path | None, typer.Option(help="File to write the trace to.")] = None,
    scale: Annotated[
        float, typer.Option(help="Size of generated graphs relative to the real ones.")
    ] = _POOL.scale,
    max_nodes: Annotated[int, typer.Option(help="Most nodes of a subgraph.")] = _POOL.max_nodes,
    max_edges: Annotated[int, typer.Option(help="Most edges of a subgraph.")] = _POOL.max_edges,
    data: Annotated[
        Path | None,
        typer.Option(
            envvar=DATA_VARIABLE, help="Graphs to send: a file or a folder; not for --graph."
        ),
    ] = None,
    graph: Annotated[
        str, typer.Option(help="Ask about nodes of this graph of the server, by their ids.")
    ] = "",
    node_type: Annotated[
        str, typer.Option(help="The type of the nodes, in a graph with several.")
    ] = "",
    ids: Annotated[
        str, typer.Option(help=f"Ids in a request: 16, or from 1-64; default {DEFAULT_IDS}.")
    ] = "",
    fanouts: Annotated[
        str, typer.Option(help="In-neighbours to sample at each hop, such as 10,5; or all.")
    ] = "",
    native: Annotated[
        bool,
        typer.Option(
            "--native",
            help="Send from compiled code over libnghttp2: a fraction of the processor time, and "
            "exact times.",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes that share the requests out and send them."),
    ] = None,
    master: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Wait there for --workers that are started elsewhere."
        ),
    ] = "",
    worker: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Be a worker of the master there, which has all options."
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(help="Time limit of a request, in seconds.")] = 30.0,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE>LIMIT",
            help="End with exit code 3 when it holds, as 'late>1%', 'p99>50ms' or "
            "'p99/target>2'; figures: "
            f"{', '.join(FIGURES)}.",
        ),
    ] = None,
    limit: Annotated[
        bool,
        typer.Option(
            "--find-limit",
            help="Find the highest rate at which no condition of --fail-if (missed>1%) holds; "
            "--rate is the first tried.",
        ),
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="File for a row about each request.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for a page about the run.")] = None,
    hdr: Annotated[
        Path | None,
        typer.Option(help="File for the latencies' percentiles, as HdrHistogram writes them."),
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Start Locust's web UI with these options in its form.")
    ] = False,
    web_host: Annotated[str, typer.Option(help="Address of the web UI.")] = "127.0.0.1",
    web_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the web UI.")] = 8089,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
) -> None:
    """Send requests at random times, whether or not earlier ones are answered (open loop).

    With --in-flight, each request is sent when an earlier one has ended (closed loop).
    """
    if worker:
        from loadgen.worker import work_for

        work_for(*address("--worker", worker))
        return
    if not target:
        raise ConfigError("give --target, HOST:PORT of the server's gRPC port")
    if master and workers is None:
        raise ConfigError("--master: say with --workers how many to wait for")
    pool = PoolSpec(scale=scale, max_nodes=max_nodes, max_edges=max_edges)
    options = LoadOptions(
        target=target,
        workload=workload,
        without=tuple(without or ()),
        rate_hz=rate,
        rho=rho,
        end_to_end=end_to_end,
        duration_s=duration,
        requests=requests,
        arrivals=arrivals,
        profile=profile,
        in_flight=in_flight,
        tenant=tenant,
        priority=priority,
        target_ms=target_ms,
        token_files=tuple(token_file or ()),
        ca=ca,
        seed=seed,
        graph=graph,
        node_type=node_type,
        ids=ids,
        fanouts=fanouts,
        pool=pool,
        data=data,
        trace=trace,
        speed=speed,
        payloads=payloads,
        save_trace=save_trace,
        timeout_s=timeout,
    )
    if web:
        if csv or html or hdr or fail_if or limit or as_json:
            raise ConfigError(
                "--web has no --csv, --html, --hdr, --fail-if, --find-limit and --json: its form "
                "and pages have their own"
            )
        if master:
            raise ConfigError("--web has no --master: it has --workers of this machine")
        command = locust_command(options, native=native, host=web_host, port=web_port)
        if workers is not None:
            from loadgen.workers import start_workers_for_exec

            command += start_workers_for_exec(workers)
        _errors.print(f"the web UI is at http://{web_host}:{web_port}/")
        os.execv(command[0], command)
    conditions = [Condition.parse(text) for text in fail_if or ()]
    require_writable(
        {"--csv": csv, "--html": html, "--hdr": hdr, "--save-trace": options.save_trace}
    )
    with _sender(native, workers, master) as run:

        def send(options: LoadOptions) -> Loop:
            if _errors.is_terminal:
                _errors.print(f"making graphs and requests for {target}", end="\r")
            loop = run(options, _tell if _errors.is_terminal else lambda _: None)
            if _errors.is_terminal:
                _errors.print(" " * _errors.width, end="\r")
            return loop

        if limit:
            if csv is not None or html is not None or hdr is not None:
                raise ConfigError(
                    "--find-limit sends many runs: give no --csv, --html, --hdr with it"
                )
            _find_limit(options, send, conditions or [Condition("missed", 0.01)], as_json)
            return
        loop = send(options)
    summary = loop.summary()
    # First, as a file may fail to be written: the disk is full.
    if as_json:
        typer.echo(msgspec.json.encode(summary))
    else:
        show_summary(summary, Console())
    if csv is not None:
        write_rows(csv, loop.samples)
    if html is not None:
        write_page(html, summary, loop.samples)
    if hdr is not None:
        write_hdr(hdr, loop.samples)
    if not summary.answered:
        raise typer.Exit(1)
    held = [one for one in conditions if one.holds(summary)]
    for one in held:
        _errors.print(one.told(summary))
    if held:
        raise typer.Exit(3)


@contextmanager
def _sender(native: bool, workers: int | None, master: str) -> Iterator[Run]:
    """Yield what sends a run: this process, or several as long as the context lasts."""
    if workers is not None:
        from loadgen.workers import LoadWorkers

        listen = address("--master", master) if master else None
        with LoadWorkers(workers, native=native, listen=listen) as several:
            yield several.run
    elif native:
        from loadgen.native import run_native

        yield run_native
    else:
        from loadgen.run import run_load

        yield run_load


def _find_limit(
    options: LoadOptions,
    send: Callable[[LoadOptions], Loop],
    conditions: list[Condition],
    as_json: bool,
) -> None:
    if options.rate_hz is None:
        raise ConfigError("--find-limit begins with --rate: give one, and no --rho and no --trace")
    options.check()

    def tell(step: TriedRate) -> None:
        verdict = ("passed" if step.passed else "failed") + ("" if step.sure else ", barely")
        _errors.print(
            f"{step.rate_hz:.4g}/s {verdict}: late {step.late:.2%}, missed {step.missed:.2%}"
        )

    seeds = itertools.count(options.seed)

    def run(rate_hz: float) -> LoadSummary:
        # Other requests and times for each run, so that runs of a rate add up.
        return send(replace(options, rate_hz=rate_hz, seed=next(seeds))).summary()

    limit = find_limit(
        run,
        options.rate_hz,
        conditions,
        tell,
    )
    if as_json:
        typer.echo(msgspec.json.encode(limit))
    else:
        beyond = "" if limit.failed_hz is None else f"; {limit.failed_hz:.4g}/s is too much"
        doubt = "" if limit.sure else ", with some doubt: send for longer"
        typer.echo(f"{limit.rate_hz:.4g} requests/s{beyond}{doubt}")
    if not limit.rate_hz:
        raise typer.Exit(1)


def _tell(loop: Loop) -> None:
    line = progress_line(loop.elapsed_s, loop.plan.trace, loop.sent, loop.samples)
    _errors.print(line.ljust(_errors.width)[: _errors.width - 1], end="\r")


def main() -> None:
    """Run the command; turns errors into exit codes."""
    try:
        app(prog_name="gnnserve load")
    except ServeError as error:
        _errors.print_error(error)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
