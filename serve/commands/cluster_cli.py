"""Commands about several machines: `cluster plan`."""

from pathlib import Path
from typing import Annotated

import typer

from serve.commands.steps import Steps
from serve.terminal import Console

app = typer.Typer(help="Plan for several machines.")
_errors = Console(stderr=True)


@app.callback()
def _group() -> None:
    """Keep `plan` a command of its own, although it is the only one."""


@app.command("plan")
def plan_command(
    file: Annotated[Path, typer.Argument(help="The description of machines and job, TOML.")],
    svg: Annotated[Path | None, typer.Option(help="Draw the placement into this file.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="How many placements to look at.")] = 10_000,
    seed: Annotated[int, typer.Option(help="The same seed finds the same placement.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find out on which machines the tasks of a distributed GNN training are best placed.

    Simulates the training with graph stores, samplers, workers and parameter servers or a ring, and
    compares with each worker beside its samplers, as DistDGL places them.
    """
    from serve.commands.plan import plan, print_plan
    from serve.commands.plan_picture import plan_picture

    with Steps(_errors) as told:
        found = plan(file, steps=steps, seed=seed, progress=told.tell)
    if svg is not None:
        svg.write_text(plan_picture(found), encoding="utf-8")
    print_plan(found, as_json=as_json)
