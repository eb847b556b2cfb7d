"""Commands about models: `import`, `init`, and `model list|load|unload`; see ``version_cli``."""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from serve.commands import version_cli
from serve.commands.server_access import (
    DEFAULT_TARGET,
    CaOption,
    JsonOption,
    NameArgument,
    TargetOption,
    TokenOption,
    server_client,
)
from serve.commands.steps import Steps
from serve.errors import ConfigError
from serve.terminal import Console

app = typer.Typer(help="List, load and unload the models of a running server; share requests out.")
_errors = Console(stderr=True)


def add_to(main: typer.Typer) -> None:
    """Add the commands to the command line."""
    main.command("import")(import_command)
    main.command("init")(init_command)
    version_cli.add_to(app)
    main.add_typer(app, name="model", no_args_is_help=True)


def init_command(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("gnnserve.toml"),
) -> None:
    """Write a configuration with every key in it, commented out. Never overwrites a file."""
    from serve.commands.init import write_configuration

    write_configuration(path)
    typer.echo(f"{path}: written; next: gnnserve serve --config {path}")


def import_command(
    name: Annotated[str, typer.Option("--name", help="The model's name for clients.")],
    factory: Annotated[
        str,
        typer.Option(help="What builds it: file.py:callable, or package.module:callable."),
    ],
    weights: Annotated[
        Path | None, typer.Option(help="Its weights: .pt, .pth or .safetensors.")
    ] = None,
    hub: Annotated[Path | None, typer.Option(help="A folder that save_pretrained wrote.")] = None,
    mlflow: Annotated[Path | None, typer.Option(help="A folder that MLflow wrote.")] = None,
    args: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A keyword argument of the factory; repeatable."),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="Tensors passed to forward, in order; default: what it requires."),
    ] = None,
    declaration: Annotated[
        Path | None,
        typer.Option(help="TOML with [[model.input]] and [[model.output]], for other inputs."),
    ] = None,
    example: Annotated[
        Path | None,
        typer.Option(help="A graph of PyG, saved by torch.save, to declare the inputs by."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Method to call instead of forward, such as encode.")
    ] = "forward",
    method_args: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="An argument of it, the same in every request; repeatable."
        ),
    ] = None,
    strip: Annotated[
        str, typer.Option(help="Prefix to remove from the weights' names, such as model.")
    ] = "",
    repository: Annotated[Path, typer.Option(help="The folder of all models.")] = Path("models"),
) -> None:
    """Bring a trained model into a repository as its newest version, and run it once.

    Writes the model's folder: configuration, code and weights as safetensors. Reads no pickled
    code. Prints a program that asks a server for the model.
    """
    from serve.commands.import_model import (
        Source,
        client_snippet,
        hub_source,
        import_model,
        mlflow_source,
        parse_arguments,
        read_declaration,
    )
    from serve.obs.log import setup_logging

    setup_logging(level="CRITICAL")
    if sum(given is not None for given in (weights, hub, mlflow)) != 1:
        raise ConfigError("give the weights by one of --weights, --hub and --mlflow")
    told = {"--inputs": inputs, "--declaration": declaration, "--example": example}
    given = [option for option, value in told.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both given; keep one")
    arguments: dict[str, Any] = {}
    if hub is not None:
        weights, arguments = hub_source(hub)
    elif mlflow is not None:
        weights = mlflow_source(mlflow)
    assert weights is not None
    source = Source(
        factory=factory,
        weights=weights,
        args=arguments | parse_arguments(args or ()),
        method=method,
        method_args=parse_arguments(method_args or (), "--method-args"),
        inputs=tuple(part.strip() for part in inputs.split(",")) if inputs else (),
        declaration="" if declaration is None else read_declaration(declaration),
        example=example,
        strip=strip,
    )
    with Steps(_errors) as steps:
        found = import_model(repository, name, source, steps.tell)
    for note in found.notes:
        _errors.print(f"note: {note}", soft_wrap=True)
    spec = found.spec
    _errors.print(
        f"{spec.folder}: version {spec.version}, {found.tensors} tensors,"
        f" {spec.weights_bytes:,} bytes; it runs. Ask a server for it:",
        soft_wrap=True,
    )
    sys.stdout.write(client_snippet(found))


@app.command("list")
def list_command(
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
    as_json: JsonOption = False,
) -> None:
    """List every version of every model in the server's repository, loaded or not."""
    from serve.client import ModelFacts
    from serve.models.repository import version_order

    with server_client(target, token, ca) as client:
        found: tuple[ModelFacts, ...] = client.models()
        if as_json:
            typer.echo(msgspec.json.encode(found))
            return
        roles = {each.model: version_cli.roles(each) for each in client.versions()}
    table = Table("model", "version", "state", "requests", "reason")
    for model in sorted(found, key=lambda each: (each.name, version_order(each.version))):
        state = Text(model.state, "green" if model.state == "READY" else "yellow")
        role = roles.get(model.name, {}).get(model.version, "")
        table.add_row(model.name, model.version, state, role, model.reason)
    Console().print(table)


@app.command("load")
def load_command(
    name: NameArgument,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Load a model, or its new versions, from the repository; returns when it serves."""
    with server_client(target, token, ca) as client, Steps(_errors) as steps:
        steps.tell(f"loading {name}", 0.5)
        client.load(name)
        _tell_versions(client, name)


@app.command("unload")
def unload_command(
    name: NameArgument,
    target: TargetOption = DEFAULT_TARGET,
    token: TokenOption = None,
    ca: CaOption = None,
) -> None:
    """Stop serving a model; its files stay."""
    with server_client(target, token, ca) as client:
        client.unload(name)
    typer.echo(f"{name}: unloaded")


def _tell_versions(client: Any, name: str) -> None:
    from serve.models.repository import version_order

    ready = [m.version for m in client.models() if m.name == name and m.state == "READY"]
    typer.echo(f"{name}: serves version {', '.join(sorted(ready, key=version_order))}")
