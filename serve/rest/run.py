"""Entry of the gateway's process: serves until the main process says so, or is gone."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

import msgspec

from serve.access.certificates import Certificates, CurrentContext
from serve.access.watching import FileWatcher
from serve.ipc.printed import log_to_pipe
from serve.ipc.signals import ignore_left_to_main
from serve.obs.log import setup_logging
from serve.rest.app import make_app
from serve.rest.backend import Backend
from serve.rest.bodies import BodyReader
from serve.rest.connections import Connections
from serve.rest.counts import Counts
from serve.rest.documentation import Documentation
from serve.rest.feed import Feed
from serve.rest.infer_paths import InferPaths
from serve.rest.lifeline import ALIVE, DRAIN
from serve.rest.live import LivePage
from serve.rest.paths import Paths
from serve.rest.serving import Server, config_of
from serve.rest.settings import INSIDE_VARIABLE, Settings

#: Bytes of bodies and answers that are held at once, as a multiple of the largest message.
_HELD_MESSAGES = 4
_ALIVE_S = 1.0
#: Time to answer requests in flight when the main process is gone.
_ORPHAN_S = 1.0


def main() -> None:
    """Serve with the settings in argv, as JSON."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    # A service manager signals all processes; the main process tells this one when to stop.
    ignore_left_to_main()
    if settings.log_to_pipe:
        log_to_pipe(sys.stderr.fileno(), settings.log_level)
    else:
        setup_logging(level=settings.log_level)
    # It warns of each malformed request, which clients could fill the log with.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    tally = Counts()
    most_bytes = settings.max_message_bytes
    callers = settings.access.callers(os.environ.pop(INSIDE_VARIABLE, None) or None)
    backend = Backend(settings.grpc_target, settings.http_backend, most_bytes)
    bodies = BodyReader(tally, most_bytes, _HELD_MESSAGES * most_bytes, settings.receive_timeout_s)
    connections = Connections(tally, settings.receive_timeout_s)
    paths = [
        *InferPaths(backend, bodies, most_bytes).table(),
        *Paths(backend, bodies, tally).table(),
    ]
    paths += Documentation(backend, paths).table()
    feed = Feed(Path(settings.database))
    paths += LivePage(feed).table()
    watched = list(callers.watched)
    context = None
    if settings.certificates is not None:
        certificates = Certificates(settings.certificates)
        watched.append(certificates.watched)
        context = CurrentContext.of(certificates)
    config = config_of(make_app(paths, bodies, tally, callers), connections, context)
    watcher = FileWatcher(*watched)
    watcher.start()
    server = Server(config)
    listener = socket.socket(fileno=settings.listener_fd)
    with socket.socket(fileno=settings.lifeline_fd) as lifeline:
        lifeline.setblocking(False)
        tasks = [
            asyncio.ensure_future(connections.watch()),
            asyncio.ensure_future(_tell_alive(lifeline, server)),
            asyncio.ensure_future(_obey(lifeline, server, feed)),
        ]
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()
        await backend.close()
    watcher.stop()


async def _tell_alive(lifeline: socket.socket, server: Server) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while True:
            if server.started:
                await loop.sock_sendall(lifeline, ALIVE)
            await asyncio.sleep(_ALIVE_S if server.started else 0.01)


async def _obey(lifeline: socket.socket, server: Server, feed: Feed) -> None:
    loop = asyncio.get_running_loop()
    try:
        told = await loop.sock_recv(lifeline, 1)
    except ConnectionError:
        told = b""
    server.should_exit = True
    feed.close()
    if told != DRAIN:
        loop.call_later(_ORPHAN_S, os._exit, 1)


if __name__ == "__main__":
    main()
