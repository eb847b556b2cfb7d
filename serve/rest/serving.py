"""How uvicorn serves an application here: with our limits on connections, and without a word."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette

from serve.rest.connections import IDLE_S, Connection, Connections
from serve.rest.handshakes import Handshake


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield


def config_of(
    app: Starlette, connections: Connections, context: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """Return the configuration of a server of this application; `context` encrypts it."""
    make: Callable[..., asyncio.Protocol] = partial(Connection, connections)
    if context is not None:
        make = partial(_begin, connections, context)
    return uvicorn.Config(
        app,
        http=make,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_S,
    )


def _begin(connections: Connections, context: ssl.SSLContext, **options: Any) -> Handshake:
    return Handshake(connections, context, partial(Connection, connections, **options))
