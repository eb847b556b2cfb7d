"""Commands about several machines: `cluster up|status|drain|update|down|page|plan`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serve.commands.options import CONFIG_PATH, ConfigOption, SetOption
from serve.commands.server_access import TokenOption
from serve.commands.steps import Steps
from serve.errors import ConfigError
from serve.terminal import Console

if TYPE_CHECKING:
    from serve.cluster.replica import Running

app = typer.Typer(help="Serve on several machines as one, and plan for them.")
_errors = Console(stderr=True)

AddressOption = Annotated[
    str, typer.Option(help="The Ray cluster's host:port; auto: the one of this machine.")
]
NameOption = Annotated[str, typer.Option(help="The cluster's name, of those on one Ray cluster.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_NAME = "default"


@app.command("up")
def up_command(
    config: ConfigOption = CONFIG_PATH,
    replicas: Annotated[
        str, typer.Option(help="Servers, each on a machine of its own: 3, or 2..6 to follow load.")
    ] = "1",
    local: Annotated[
        int | None,
        typer.Option(min=1, help="So many servers on this machine instead, without Ray."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address that the front listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Its port.")] = 8000,
    cpus: Annotated[
        float, typer.Option(min=0, help="Cores that a machine has to have free for a server.")
    ] = 1.0,
    gpus: Annotated[float, typer.Option(min=0, help="The same for GPUs.")] = 0.0,
    lease: Annotated[str, typer.Option(help="How long servers go on without Ray.")] = "1h",
    address: AddressOption = "auto",
    name: NameOption = _NAME,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a server on each of several machines of a Ray cluster, and a front before them.

    Returns once all serve; they go on. Each machine reads the configuration file at the same path.
    Again with other options, it changes the cluster. With --local it needs no Ray and runs until a
    signal; once all serve, it tells where their live pages are and prints `ready`.
    """
    from serve.commands.cluster import pages_told, pool_of, show, up_local, up_on_ray

    count = replicas if local is None else str(local)
    pool = pool_of(name, config, settings, count, host, port, cpus, gpus, lease)
    with Steps(_errors) as steps:
        if local is not None:

            def ready(running: "list[Running]") -> None:
                steps.close()
                for line in pages_told(running):
                    _errors.print(line, soft_wrap=True, highlight=False)
                typer.echo("ready")

            up_local(pool, ready, steps.tell)
            return
        found = up_on_ray(pool, address, steps.tell)
    show(found, as_json)


@app.command("status")
def status_command(
    address: AddressOption = "auto", name: NameOption = _NAME, as_json: JsonOption = False
) -> None:
    """Show the servers of a cluster, and the address that answers for all."""
    from serve.commands.cluster import show, status

    show(status(name, address), as_json)


@app.command("drain")
def drain_command(
    machine: Annotated[str, typer.Argument(help="A machine, or the address of its server.")],
    back: Annotated[bool, typer.Option("--back", help="Send it requests again.")] = False,
    address: AddressOption = "auto",
    name: NameOption = _NAME,
) -> None:
    """Send a machine no new requests, before it is taken out; it finishes what it has."""
    from serve.commands.cluster import drain

    for drained in drain(name, address, machine, back=back):
        typer.echo(drained)


@app.command("update")
def update_command(
    config: Annotated[
        Path | None, typer.Option("--config", help="Another configuration file.")
    ] = None,
    replicas: Annotated[str | None, typer.Option(help="Another number of servers.")] = None,
    settings: SetOption = None,
    trial: Annotated[
        str, typer.Option(help="How long the first one is on trial, at most 30m; 0 for no trial.")
    ] = "1m",
    address: AddressOption = "auto",
    name: NameOption = _NAME,
    as_json: JsonOption = False,
) -> None:
    """Start every server anew, one after the other, with what the configuration file says now.

    The first is on trial beside the others. If it clearly does worse, it is taken back.
    """
    from serve.commands.cluster import show, update

    with Steps(_errors) as steps:
        found = update(name, address, config, replicas, settings, trial, steps.tell)
    show(found, as_json)


@app.command("down")
def down_command(address: AddressOption = "auto", name: NameOption = _NAME) -> None:
    """End all servers of a cluster in order, and its front. Ray goes on."""
    from serve.commands.cluster import down

    with Steps(_errors) as steps:
        down(name, address, steps.tell)


@app.command("page")
def page_command(
    server: Annotated[
        list[str] | None,
        typer.Option(help="A server's host:port for HTTP, or name=host:port; once for each."),
    ] = None,
    name: NameOption = _NAME,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 8003,
    token: TokenOption = None,
) -> None:
    """Serve one live page of all servers, until a signal; prints its address.

    Without --server they are those of a cluster whose head is this machine.
    """
    from serve.cluster.live_page import ClusterServers, named_servers, run_page

    given = named_servers(server) if server else None
    run_page(
        host, port, ClusterServers(name) if given is None else lambda: given, token, typer.echo
    )


@app.command("plan")
def plan_command(
    file: Annotated[
        Path, typer.Argument(help="The description of machines, and job or servers, TOML.")
    ],
    svg: Annotated[Path | None, typer.Option(help="Draw the placement into this file.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="How many placements to look at.")] = 10_000,
    seed: Annotated[int, typer.Option(help="The same seed finds the same placement.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find out on which machines the tasks of a distributed GNN training, or servers, are best.

    Simulates the training with graph stores, samplers, workers and parameter servers or a ring, and
    compares with each worker beside its samplers, as DistDGL places them. A description with
    requests is one of servers: stores of a graph's parts, samplers and lanes.
    """
    from serve.toml_tables import read_toml

    table, where = read_toml(file), str(file)
    if svg is not None and (svg.is_dir() or not svg.parent.is_dir()):
        raise ConfigError(f"--svg {svg}: a file in a folder that is there is wanted")
    with Steps(_errors) as told:
        if "requests" in table:
            from serve.commands.serving_picture import serving_picture
            from serve.commands.serving_plan import plan_servers, print_servers

            servers = plan_servers(table, where, steps=steps, seed=seed, progress=told.tell)
            picture, show = partial(serving_picture, servers), partial(print_servers, servers)
        else:
            from serve.commands.plan import plan, print_plan
            from serve.commands.plan_picture import plan_picture

            found = plan(table, where, steps=steps, seed=seed, progress=told.tell)
            picture, show = partial(plan_picture, found), partial(print_plan, found)
    show(as_json=as_json)
    if svg is not None:
        try:
            svg.write_text(picture(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--svg {svg}: cannot be written: {error.strerror}") from error
