"""Commands about training beside requests: `train`, and `job list|watch|cancel`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from serve.commands.server_access import (
    DEFAULT_TARGET,
    CaOption,
    JsonOption,
    NameArgument,
    TargetOption,
    TokenOption,
    server_client,
)
from serve.errors import ServeError
from serve.terminal import Console

if TYPE_CHECKING:
    from serve.client import JobFacts

app = typer.Typer(help="Show and end trainings.")
_errors = Console(stderr=True)
JobArgument = Annotated[int, typer.Argument(metavar="JOB", help="Number of the job.", min=1)]


def train_command(
    name: NameArgument,
    graph: Annotated[str, typer.Option(help="A graph that the server holds, with labels.")],
    epochs: Annotated[int, typer.Option(help="Steps over the whole graph.", min=1)] = 100,
    learning_rate: Annotated[float, typer.Option("--lr", help="Learning rate of Adam.")] = 0.005,
    seed: Annotated[int, typer.Option(help="Of the split and of all random numbers.")] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from new weights, not from those served.")
    ] = False,
    priority: Annotated[int, typer.Option(help="1 is the most urgent, 0 the default.")] = 0,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return at once, without progress.")
    ] = False,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Train a model of a running server on what requests leave, and serve it as its next version.

    The job belongs to the server: it goes on when this command ends, and when the server restarts.
    """
    with server_client(target, token, ca) as client:
        job: JobFacts = client.train(
            name, graph, epochs=epochs, learning_rate=learning_rate, seed=seed, fresh=fresh,
            priority=priority,
        )  # fmt: skip
        typer.echo(f"job {job.job_id}: {name} on {graph}, {epochs} epochs")
        if not no_wait:
            _follow(client.watch_job(job.job_id))


def list_command(
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
    as_json: JsonOption = False,
) -> None:
    """List trainings, those that ended lately among them."""
    with server_client(target, token, ca) as client:
        found: tuple[JobFacts, ...] = client.jobs()
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    table = Table("job", "model", "graph", "state", "epochs", "loss", "version", "note")
    for job in found:
        table.add_row(
            str(job.job_id), job.model, job.graph, job.state, f"{job.epochs_done}/{job.epochs}",
            f"{job.loss:.3f}" if job.epochs_done else "", str(job.version or ""), job.message,
        )  # fmt: skip
    Console().print(table)


def watch_command(
    job: JobArgument,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Follow a training to its end."""
    with server_client(target, token, ca) as client:
        _follow(client.watch_job(job))


def cancel_command(
    job: JobArgument,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """End a training, unless it has ended or its version is published."""
    with server_client(target, token, ca) as client:
        found: JobFacts = client.cancel_job(job)
    if found.version and not found.ended:
        typer.echo(f"job {job}: too late, it is published as version {found.version}")
        return
    typer.echo(f"job {job}: {found.state} after {found.epochs_done} of {found.epochs} epochs")


app.command("list")(list_command)
app.command("watch")(watch_command)
app.command("cancel")(cancel_command)


def _follow(states: "Iterable[JobFacts]") -> None:
    """Show a job as it gets on; raises ServeError when it failed."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=_errors) as progress:
        bar = progress.add_task("queued", total=None, note="")
        for job in states:
            note = ""
            if job.epochs_done:
                note = f"loss {job.loss:.3f}, {job.epoch_ns / 1e6:.1f} ms an epoch"
            progress.update(
                bar, description=job.state, total=job.epochs, completed=job.epochs_done, note=note
            )
    if job.state == "failed":
        raise ServeError(f"job {job.job_id} failed: {job.message}")
    if job.state == "cancelled":
        typer.echo(f"job {job.job_id}: cancelled after {job.epochs_done} epochs")
        return
    typer.echo(
        f"job {job.job_id}: {job.model} version {job.version}, "
        f"{100 * job.accuracy:.1f} % of the held-out nodes right, loss {job.loss:.3f}"
    )
