"""`gnnserve demo`: start a server, send requests and a load, and show the report.

The server and the load generator are processes of their own, as in real use. Both have ended when
the demo ends, however it ends. All files it leaves behind are in one folder.
"""

import importlib.util
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
import numpy as np
from rich.table import Table
from rich.text import Text

from serve.client import Answer, Client, ClientError
from serve.commands.steps import Steps
from serve.errors import ConfigError, NotReady
from serve.models.community import LabelledGraph, community_graph
from serve.obs.cli_report import run_report
from serve.resources import configs_path
from serve.terminal import Console

#: Long, as the first start on a machine calibrates every model.
_START_S = 180.0
_STOP_S = 45.0
_HOST = "127.0.0.1"
_MODELS = ("gcn", "sage", "gin", "gat")
#: Moderate, as the load generator runs on the same cores.
_RHO = "0.15"
#: Graphs are small, so that the load is hundreds of requests.
_LOAD = ("--workload", "mix", "--rho", _RHO, "--end-to-end", "--scale", "0.02",
         "--max-nodes", "2000")  # fmt: skip
_CONFIG = """\
# Written by `gnnserve demo`; serve it again with: gnnserve serve --config {path}
[server]
host = "{host}"
grpc_port = {grpc_port}
http_port = {http_port}

[models]
repository = {models}

[report]
database = "gnnserve.db"

# The graph that the models were trained on, for requests by node ids.
[[graph]]
name = "community"
dataset = "community"
"""

_console = Console()


def run_demo(folder: Path, duration_s: float) -> None:
    """Run the demo with its files in `folder` and `duration_s` of load.

    Raises ConfigError when Locust is not installed, NotReady when the server does not start, and
    KeyboardInterrupt on Ctrl-C or SIGTERM.
    """
    if importlib.util.find_spec("locust") is None:
        raise ConfigError("the demo's load needs Locust; run: pip install 'gnnserve[server,load]'")
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / "gnnserve.db"
    for suffix in ("", "-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    config, address = _write_config(folder)
    with _sigterm_interrupts(), _server(config, folder / "server.log"):
        _say("1. A server on ", (address, "bold"), f", its settings in {config}")
        with Client(address, timeout_s=30.0) as client:
            _show_server(client)
            _say("2. Each model classifies the nodes of a graph of five communities")
            _show_requests(client, community_graph())
        _say(
            f"3. {duration_s:g} s of requests at random times, sent whether or not earlier ones "
            f"are answered; offered load {_RHO}"
        )
        _load(address, duration_s)
    _say("4. The server's own report, after it has stopped")
    page = folder / "report.html"
    run_report(database)
    run_report(database, html=page)
    _say("Where to look next")
    for purpose, target in (
        ("report with plots", str(page)),
        ("serve again", f"gnnserve serve --config {config}"),
        ("load it", f"gnnserve load --target {address} --rho 0.4 --end-to-end --duration 30"),
        ("report again", f"gnnserve report --db {database} --since 10m"),
    ):
        _console.print(Text.assemble(f"  {purpose:22} ", (target, "bold")), soft_wrap=True)


def _say(*parts: str | tuple[str, str]) -> None:
    _console.print(Text.assemble("\n", *parts, style="cyan"), soft_wrap=True)


def _write_config(folder: Path) -> tuple[Path, str]:
    """Write a configuration with two free ports; return its path and the gRPC address."""
    with socket.socket() as one, socket.socket() as other:
        for chosen in (one, other):
            chosen.bind((_HOST, 0))
        grpc_port, http_port = one.getsockname()[1], other.getsockname()[1]
    path = folder / "gnnserve.toml"
    models = msgspec.json.encode(str(configs_path() / "models")).decode()
    path.write_text(
        _CONFIG.format(
            path=path, host=_HOST, grpc_port=grpc_port, http_port=http_port, models=models
        ),
        encoding="utf-8",
    )
    return path, f"{_HOST}:{grpc_port}"


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does, with everything that it started."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _child(command: list[str], stop_s: float, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a module as a process; at the end send SIGTERM and, `stop_s` later, SIGKILL."""
    # A session of its own, so that Ctrl-C reaches only the demo, which ends its children in order;
    # -P, so that a `serve.py` in the current folder does not shadow the package.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *command], text=True, start_new_session=True, **streams
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _server(config: Path, log: Path) -> Iterator[None]:
    """Start a server and wait until it is ready; drain and stop it at the end.

    Raises NotReady when it does not start, and when it ended before it was stopped.
    """
    command = ["serve", "serve", "--config", str(config)]
    with (
        log.open("w", encoding="utf-8") as errors,
        _child(command, _STOP_S, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        with Steps(_console) as steps:
            _wait_ready(process, log, steps)
        yield
        if process.poll() is not None:
            raise NotReady(_ended(process, log))


def _wait_ready(process: subprocess.Popen[str], log: Path, steps: Steps) -> None:
    """Return once the server printed `ready`; raises NotReady when it ends or takes too long."""
    assert process.stdout is not None
    started = time.monotonic()
    while (waited_s := time.monotonic() - started) < _START_S:
        # The remaining time is unknown, so the bar approaches its end and never reaches it.
        steps.tell(f"starting the server: {_last_message(log)}", waited_s / (waited_s + 10))
        if select.select([process.stdout], [], [], 0.1)[0]:
            line = process.stdout.readline()
            if line.strip() == "ready":
                return
            if not line:
                process.wait()
                raise NotReady(_ended(process, log))
    raise NotReady(f"the server was not ready within {_START_S:g} s; see {log}")


def _ended(process: subprocess.Popen[str], log: Path) -> str:
    return f"the server ended with code {process.returncode}: {_last_message(log)} (see {log})"


def _last_message(log: Path) -> str:
    """Return the message of the last line in the server's log."""
    lines = log.read_text(encoding="utf-8").splitlines()
    if not lines:
        return "…"
    try:
        return str(msgspec.json.decode(lines[-1])["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return lines[-1]


def _load(address: str, duration_s: float) -> None:
    """Run the load generator, which prints its own tables; raises NotReady when it fails."""
    command = ["loadgen", "--target", address, "--duration", str(duration_s), *_LOAD]
    with _child(command, _STOP_S) as process:
        process.wait()
    if process.returncode:
        raise NotReady(f"the load generator ended with code {process.returncode}")


def _show_server(client: Client) -> None:
    facts = client.describe()
    budget_gib = facts.budget_bytes / 2**30
    _console.print(
        f"   {facts.device}, {facts.slots} requests at once, {budget_gib:.1f} GiB for them; policy "
        f"{facts.policy}, discipline {facts.discipline}; each request gets a target of "
        f"{facts.qos_factor:g} × the time it would take alone",
        soft_wrap=True,
    )


def _show_requests(client: Client, graph: LabelledGraph) -> None:
    """Send one request to each model and show accuracy, target and times; then an invalid one."""
    table = Table(
        "model", "accuracy", "alone, ms", "promised, ms", "run, ms", "memory, MiB", "kept"
    )
    for column in table.columns[1:-1]:
        column.justify = "right"
    for model in _MODELS:
        answer = client.infer(model, x=graph.x, edge_index=graph.edge_index)
        table.add_row(model, *_cells(answer, graph))
    _console.print(table)
    _console.print(
        f"   {graph.x.shape[0]:,} nodes, {graph.edge_index.shape[1]:,} edges; accuracy on nodes "
        f"that no model was trained on, where guessing gives {1 / graph.num_classes:.0%}",
        soft_wrap=True,
    )
    wrong = graph.edge_index.copy()
    wrong[1, 7] = graph.x.shape[0]
    try:
        client.infer("gcn", x=graph.x, edge_index=wrong)
    except ClientError as error:
        refusal = Text.assemble("   an edge to nowhere is refused: ", (f"{error}", "yellow"))
        _console.print(refusal, soft_wrap=True)


def _cells(answer: Answer, graph: LabelledGraph) -> tuple[str, ...]:
    qos = answer.qos
    right = (answer.output.argmax(axis=1) == graph.y)[graph.test_mask]
    measured = qos.pmc_measured_bytes
    return (
        f"{float(np.mean(right)):.1%}",
        f"{qos.solo_estimate_us / 1e3:.2f}",
        f"{qos.qos_target_us / 1e3:.2f}",
        f"{qos.run_us / 1e3:.2f}",
        f"{(measured or qos.pmc_estimate_bytes) / 2**20:.1f}",
        "late" if qos.qos_violated else "yes",
    )
