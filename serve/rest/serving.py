"""How uvicorn serves an application here: with our limits on connections, and without a word."""

import contextlib
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.applications import Starlette

from serve.rest.connections import IDLE_S, Connection, Connections


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield


def config_of(app: Starlette, connections: Connections) -> uvicorn.Config:
    """Return the configuration of a server of this application."""
    return uvicorn.Config(
        app,
        http=partial(Connection, connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_S,
    )
