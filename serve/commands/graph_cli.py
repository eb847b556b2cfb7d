"""Commands about graphs that servers hold: `graph import`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from serve.commands.steps import Steps
from serve.terminal import Console

app = typer.Typer(help="Prepare graphs for a server to hold.")
_errors = Console(stderr=True)


@app.callback()
def _group() -> None:
    """Keep `import` a command of its own, although it is the only one."""


@app.command("import")
def import_command(
    file: Annotated[
        Path, typer.Argument(help="A Data or HeteroData of PyG, saved by torch.save (.pt).")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write: .safetensors or .npz; default: beside it, .safetensors."
        ),
    ] = None,
) -> None:
    """Write a saved graph as a file that servers read, and open it once.

    Reads no pickled code. Prints what the server's configuration says to hold the graph.
    """
    from serve.commands.import_graph import graph_section, import_graph
    from serve.obs.log import setup_logging

    setup_logging(level="CRITICAL")
    with Steps(_errors) as steps:
        found = import_graph(file, out or file.with_suffix(".safetensors"), steps.tell)
    for note in found.notes:
        _errors.print(f"note: {note}", soft_wrap=True)
    _errors.print(
        f"{found.path}: {found.num_nodes:,} nodes, {found.num_edges:,} edges. In the server's"
        " configuration:",
        soft_wrap=True,
    )
    sys.stdout.write(graph_section(found))
