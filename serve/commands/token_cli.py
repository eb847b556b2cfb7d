"""Commands about credentials: `token new|list|revoke`."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from serve.access.principal import Role
from serve.access.tokens import (
    Token,
    TokensFile,
    changing_tokens,
    hash_of,
    new_token,
    read_tokens,
    unprinted_names,
    write_tokens,
)
from serve.config import load_config
from serve.errors import ConfigError
from serve.terminal import Console
from serve.toml_tables import decode_table
from serve.units import parse_duration

app = typer.Typer(help="Make, list and revoke the tokens of a server's tokens file.")

ConfigOption = Annotated[
    Path, typer.Option("--config", help="The configuration whose auth.tokens_file is meant.")
]
FileOption = Annotated[
    Path | None, typer.Option("--file", help="The tokens file, instead of the configuration's.")
]
_CONFIG = Path("gnnserve.toml")
_ROLES = tuple(role.value for role in Role)
#: Characters of a hash that tell tokens apart for people.
_ID_LENGTH = 12
_ID = re.compile(r"[0-9a-f]+")


@app.command("new")
def new_command(
    principal: Annotated[str, typer.Argument(help="Whom the token is for.")],
    role: Annotated[
        list[str] | None, typer.Option("--role", help="infer, observe or admin; repeatable.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="The tenant of its requests; default: the principal.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Time until it expires, such as 90d; default: never.")
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(help="Accept certificates of this alternative name, and make no token."),
    ] = None,
    config: ConfigOption = _CONFIG,
    file: FileOption = None,
) -> None:
    """Make a token, add its hash to the tokens file, and print it: it is shown this once."""
    path = _path(config, file)
    for name in role or ():
        if name not in _ROLES:
            raise ConfigError(f"--role: '{name}' is not one of {', '.join(_ROLES)}")
    text = None if certificate is not None else new_token()
    until = None
    if expires is not None:
        try:
            until = datetime.now(UTC).replace(microsecond=0) + timedelta(
                seconds=parse_duration(expires, "--expires")
            )
        except OverflowError as error:
            raise ConfigError(f"--expires {expires}: it is too far in the future") from error
    given = {
        "principal": principal,
        "hash": None if text is None else hash_of(text),
        "certificate": certificate,
        "roles": role or ["infer"],
        "tenant": tenant,
        "expires": until,
    }
    row = decode_table(
        {key: value for key, value in given.items() if value is not None}, Token, "token new"
    )
    if problems := list(unprinted_names(row)):
        raise ConfigError("\n".join(f"token new: {problem}" for problem in problems))
    with changing_tokens(path):
        content = read_tokens(path) if path.exists() else TokensFile()
        if certificate is not None and certificate in {one.certificate for one in content.token}:
            raise ConfigError(f"{path}: the certificate '{certificate}' is there already")
        write_tokens(path, msgspec.structs.replace(content, token=(*content.token, row)))
    typer.echo(f"{path}: {principal} may {', '.join(row.roles)}", err=True)
    if text is not None:
        typer.echo(text)


@app.command("list")
def list_command(
    config: ConfigOption = _CONFIG,
    file: FileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the credentials: of tokens only the beginning of the hash."""
    content = read_tokens(_path(config, file))
    rows = [
        {
            "id": id_of(one),
            "principal": one.principal,
            "roles": list(one.roles),
            "tenant": one.tenant_name,
            "expires": None if one.expires is None else one.expires.isoformat(),
        }
        for one in content.token
    ]
    if as_json:
        typer.echo(msgspec.json.encode(rows))
        return
    table = Table("id", "principal", "roles", "tenant", "expires")
    for row in rows:
        table.add_row(
            str(row["id"]),
            str(row["principal"]),
            ", ".join(row["roles"] or ()),
            str(row["tenant"]),
            str(row["expires"] or "never"),
        )
    Console().print(table)


@app.command("revoke")
def revoke_command(
    name: Annotated[str, typer.Argument(help="The id of one credential, or a principal.")],
    config: ConfigOption = _CONFIG,
    file: FileOption = None,
) -> None:
    """Remove a credential, or all of a principal; a running server refuses them in a second."""
    path = _path(config, file)
    with changing_tokens(path):
        content = read_tokens(path)
        kept = tuple(one for one in content.token if one.principal != name and not _is(one, name))
        gone = len(content.token) - len(kept)
        if not gone:
            raise ConfigError(f"{path}: it has no credential of the id or principal '{name}'")
        write_tokens(path, msgspec.structs.replace(content, token=kept))
    typer.echo(f"{path}: {gone} removed")


def id_of(token: Token) -> str:
    """Return what tells a credential apart: of a token the beginning of its hash."""
    if token.hash is None:
        return token.certificate or ""
    return token.hash.partition(":")[2][:_ID_LENGTH]


def _is(token: Token, name: str) -> bool:
    if token.hash is None:
        return token.certificate == name
    return (
        len(name) >= _ID_LENGTH
        and bool(_ID.fullmatch(name))
        and (token.hash.partition(":")[2].startswith(name))
    )


def _path(config: Path, file: Path | None) -> Path:
    if file is not None:
        return file
    loaded = load_config(config)
    if loaded.auth.tokens_file is None:
        raise ConfigError(f"{config}: auth.tokens_file is not set; name a file with --file")
    return loaded.path(loaded.auth.tokens_file)
