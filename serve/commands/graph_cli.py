"""Commands about graphs that servers hold: `graph import|partition|apply`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from serve.commands.options import CONFIG_PATH, ConfigOption
from serve.commands.steps import Steps
from serve.terminal import Console

app = typer.Typer(help="Prepare graphs for a server to hold.")
_errors = Console(stderr=True)


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


@app.command("partition")
def partition_command(
    file: Annotated[Path, typer.Argument(help="A graph that servers read.")],
    parts: Annotated[int, typer.Option(min=1, help="Machines to share the graph out to.")],
    method: Annotated[
        str, typer.Option(help="metis: few edges between parts; random: for comparison.")
    ] = "metis",
    fanouts: Annotated[str, typer.Option(help="As of requests, such as 10,5; or all.")] = "10,10",
    hot: Annotated[
        float, typer.Option(min=0, max=1, help="Share of nodes that are everywhere.")
    ] = 0.05,
    out: Annotated[
        Path | None, typer.Option(help="Write the part of each node here, .npy of uint16.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Share out a graph, and tell what requests would fetch from other machines.

    Each request is at the machine whose part has most of its ids. Edges are on every machine, or
    shared out too: the last column tells how often a request then waits for neighbours.
    """
    from serve.commands.partition_graph import partition_graph, print_partition
    from serve.obs.log import setup_logging

    setup_logging(level="CRITICAL")
    with Steps(_errors) as steps:
        found = partition_graph(file, parts, method, fanouts, hot, out, steps.tell)
    print_partition(found, as_json)


@app.command("apply")
def apply_command(
    name: Annotated[str, typer.Argument(help="A shared graph of the configuration.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it is not there yet.")],
    config: ConfigOption = CONFIG_PATH,
) -> None:
    """Write a shared graph anew, with all changes of the sequencer's log, and its parts.

    For the sequencer's machine, while its server is stopped.
    """
    from serve.commands.apply_changes import apply_changes
    from serve.config import load_config
    from serve.obs.log import setup_logging

    setup_logging(level="CRITICAL")
    with Steps(_errors) as steps:
        found = apply_changes(load_config(config), name, out, steps.tell)
    sys.stdout.write(
        f"{out}: {found.changes:,} changes make it {found.num_nodes:,} nodes and"
        f" {found.num_edges:,} edges; its parts are in {out / 'parts.npy'}\n"
    )
