"""How commands reach a running server: their options, and a client whose errors end them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from serve.access.admin_path import find_socket
from serve.errors import ConfigError, ServeError

TargetOption = Annotated[
    str, typer.Option("--target", help="The server: host:port, or https://host.")
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", envvar="GNNSERVE_TOKEN", help="Token to send."),
]
CaOption = Annotated[
    Path | None, typer.Option("--ca", help="PEM file of the authorities to trust, for https.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
NameArgument = Annotated[str, typer.Argument(help="A model of the server's repository.")]
DEFAULT_TARGET = "127.0.0.1:8001"


def _admin_socket(target: str) -> Path | None:
    """Return the admin socket of a server on this host; None when it has none."""
    host, _, port = target.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdecimal():
        return None
    return find_socket(int(port))


@contextmanager
def server_client(target: str, token: str | None, ca: Path | None) -> Iterator[Any]:
    """Yield a client; its errors end the command as those of the server do."""
    from serve.client import Client, ClientError, Unavailable

    make: Callable[..., Client] = Client
    if token is None and ca is None and (socket := _admin_socket(target)) is not None:
        target = f"unix:{socket}"
    try:
        client = make(target, token=token, credentials=ca)
    except OSError as error:
        raise ConfigError(f"--ca: {ca}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        with client:
            yield client
    except ClientError as error:
        advice = _advice(error.message) if isinstance(error, Unavailable) else ""
        raise ServeError(f"{target}: {error}{advice}") from error


def _advice(message: str) -> str:
    """Return what to do where gRPC reaches nobody; a server that is there has words of its own."""
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return "; --ca names the authorities to trust"
    if "failed to connect" not in message and "resolving" not in message:
        return ""
    if "Socket closed" in message:
        return "; if the server encrypts, write --target https://…"
    return "; is a server running there? --target names another"
