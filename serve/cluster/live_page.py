"""One live page of several servers, each of which has it as a single viewer.

It is a process of its own: who looks at a cluster can neither slow its front nor end it.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path as FilePath

import msgspec
from starlette.requests import Request

from serve.access.callers import Callers
from serve.cluster.live_sum import summed
from serve.cluster.live_watch import LiveWatch
from serve.cluster.registry import Announcement
from serve.cluster.replica import state_folder
from serve.config_cluster import host_port
from serve.errors import ConfigError
from serve.obs.http import listening_socket
from serve.rest.app import make_app
from serve.rest.bodies import BodyReader
from serve.rest.connections import Connections
from serve.rest.counts import Counts
from serve.rest.errors import RestError
from serve.rest.feed import EVERY_S, MOST_WATCHERS, EventStream, event
from serve.rest.live import ASSETS
from serve.rest.page_files import PageFiles
from serve.rest.replies import HttpReply, Path, Pieces
from serve.rest.serving import Server, config_of

#: Most servers that are read.
MOST_SERVERS = 64
_OWN_ASSETS = FilePath(__file__).parent / "assets"
#: How often it is found out which servers there are.
_LOOK_S = 0.2
#: Time for a browser to send a request, and bytes of answers that are held at once.
_REQUEST_S, _HELD_BYTES = 10.0, 64 << 20

#: Names of machines by the addresses, `host:port`, of their servers for HTTP.
Servers = Mapping[str, str]


class Watches:
    """What is read of all servers, which may change."""

    def __init__(self, servers: Callable[[], Servers], token: str | None) -> None:
        """`servers` returns those that there are now; `token` is sent to each."""
        self._servers = servers
        self._token = token
        self._watches: dict[str, LiveWatch] = {}
        self._known_count = 0
        self._said, self._said_s = b"", 0.0

    def look(self) -> None:
        """Read those servers that there are now, and no others."""
        known = self._servers()
        self._known_count = len(known)
        found = dict(islice(known.items(), MOST_SERVERS))
        for address in self._watches.keys() - found.keys():
            self._watches.pop(address).end()
        for address, machine in found.items():
            if address not in self._watches:
                self._watches[address] = LiveWatch(machine, address, self._token)

    def end(self) -> None:
        """Read nothing more."""
        for watch in self._watches.values():
            watch.end()
        self._watches.clear()

    def event(self, now_s: float) -> bytes:
        """Return the numbers of all as a server-sent event, made at most once a second."""
        if not 0 <= now_s - self._said_s < EVERY_S:
            machines = [watch.latest(now_s) for watch in self._watches.values()]
            machines.sort(key=lambda one: (one.machine, one.address))
            found = summed(machines, now_s)
            if len(machines) < self._known_count:
                found["alarms"].append(f"{len(machines)} of {self._known_count} servers are shown.")
            self._said, self._said_s = event("all", found), now_s
        return self._said


class ClusterPage:
    """Handlers of the page; for one event loop."""

    def __init__(self, watches: Watches) -> None:
        self._watches = watches
        self._files = PageFiles("cluster.html", (ASSETS, _OWN_ASSETS))
        self._viewers = 0
        self.over = asyncio.Event()

    def table(self) -> list[Path]:
        """Return all paths."""
        return [
            *self._files.table(),
            Path("GET", "/live/events", self.events),
        ]

    async def events(self, request: Request) -> HttpReply:
        """Return the numbers of all servers once a second; raises RestError for too many."""
        if self._viewers >= MOST_WATCHERS:
            raise RestError(
                503, f"{self._viewers} pages watch, as many as may; close one and try again"
            )
        self._viewers += 1
        stream: Pieces = EventStream(self._numbers(), self._leave)
        return HttpReply(b"", "text/event-stream", stream=stream)

    async def _numbers(self) -> AsyncIterator[bytes]:
        while not self.over.is_set():
            yield self._watches.event(time.time())
            await self.over_within(EVERY_S)

    async def over_within(self, limit_s: float) -> None:
        """Return when the page ends, or after so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), limit_s)

    def _leave(self) -> None:
        self._viewers -= 1


def named_servers(given: list[str]) -> Servers:
    """Return the servers of `host:port` or `name=host:port`; raises ConfigError."""
    found: dict[str, str] = {}
    for text in given:
        name, _, address = text.rpartition("=")
        host, _, port = address.rpartition(":")
        if not (host and port.isascii() and port.isdecimal() and int(port) in range(1, 65536)):
            raise ConfigError(f"--server '{text}': expected host:port, or name=host:port")
        if address in found:
            raise ConfigError(f"--server '{text}': {address} is given twice")
        found[address] = name or address
    if len(found) > MOST_SERVERS:
        raise ConfigError(f"--server: {len(found)} servers; a page has at most {MOST_SERVERS}")
    return found


class ClusterServers:
    """The servers of a cluster, from the file that its coordinator keeps on this machine."""

    def __init__(self, cluster: str) -> None:
        """Read the file; raises ConfigError when there is none."""
        self._file = state_folder(cluster) / "known.json"
        self._known: Servers = {}
        if not self._file.exists():
            raise ConfigError(
                f"there is no cluster '{cluster}' on this machine: run this on the head, or give "
                "--server for each server"
            )

    def __call__(self) -> Servers:
        """Return those that it has now; the last ones when the file cannot be read."""
        try:
            said = msgspec.json.decode(self._file.read_bytes(), type=list[Announcement])
            self._known = {one.http_address: one.machine for one in said}
        except (OSError, ValueError):
            pass
        return self._known


def run_page(
    host: str, port: int, servers: Callable[[], Servers], token: str | None,
    on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve the page until SIGINT or SIGTERM; `on_ready` gets its address.

    Raises ConfigError when the port is taken.
    """
    asyncio.run(_serve(host, port, Watches(servers, token), on_ready))


async def _serve(host: str, port: int, watches: Watches, on_ready: Callable[[str], None]) -> None:
    listener = listening_socket(host, port, "--port")
    tally = Counts()
    connections = Connections(tally, _REQUEST_S)
    page = ClusterPage(watches)
    bodies = BodyReader(tally, 0, _HELD_BYTES, _REQUEST_S)
    server = Server(config_of(make_app(page.table(), bodies, tally, Callers()), connections))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, page.over.set)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    watching = asyncio.ensure_future(connections.watch())
    said = False
    try:
        while not page.over.is_set() and not serving.done():
            watches.look()
            if server.started and not said:
                said = True
                address, at = listener.getsockname()[:2]
                on_ready(f"http://{host_port(address, at)}/")
            await page.over_within(_LOOK_S)
    finally:
        server.should_exit = True
        watches.end()
        await serving
        watching.cancel()
