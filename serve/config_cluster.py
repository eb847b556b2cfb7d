"""The section of the configuration about other servers, see ``config``."""

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Annotated, Protocol

from msgspec import Meta

from serve.toml_tables import Section
from serve.units import parse_bytes


class RowsConfig(Section, frozen=True):
    """Section `[cluster.rows]`: graphs that are shared out over several servers."""

    #: Part of these graphs that is here, from 0.
    part: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    #: `host:port` at which other servers ask for features; None: no graph is shared out.
    listen: str | None = None
    #: File that names all servers: `host:port PART` in each line. Servers of one part are replicas.
    #: None: `gnnserve cluster up` writes it for each server that it starts on a Ray cluster.
    servers_file: str | None = None
    #: This server's address in that file; None: `listen`.
    address: str | None = None
    #: File of all changes, and the size that it may have. The first server of the file of servers
    #: writes it.
    log: str = "changes.log"
    log_size: str = "1 GiB"
    #: File with the key that these servers have in common. None: whoever reaches the port gets
    #: features, so it has to be on loopback.
    key_file: str | None = None
    #: A server that sends nothing for so long has lost its features.
    patience_ms: Annotated[int, Meta(ge=10, le=10_000)] = 80

    @property
    def log_bytes(self) -> int:
        """`log_size` in bytes."""
        return parse_bytes(self.log_size, "cluster.rows.log_size")


class ClusterConfig(Section, frozen=True):
    """Section `[cluster]`: other servers, which may answer a request in place of this one."""

    #: File that names the servers, `host:port` in each line, this one too or not; read again when
    #: it changes. What this server cannot hold or would answer late is passed on, once. None: no.
    servers_file: str | None = None
    #: Name of this server in answers; None: the host's name and the gRPC port.
    name: str | None = None
    #: File with the key of the front, which alone may tell when it got a request.
    front_key_file: str | None = None
    rows: RowsConfig = RowsConfig()


def is_loopback(host: str) -> bool:
    """Return True when only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_port(host: str, port: int) -> str:
    """Return `host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class SharedOut(Protocol):
    """What a graph's section says of how it is shared out, see ``config.GraphConfig``."""

    @property
    def name(self) -> str:
        """Name of the graph."""
        ...

    @property
    def parts(self) -> str | None:
        """File with the part of each node; None: all of it is here."""
        ...

    @property
    def share(self) -> str:
        """`features`, or `all`: what of a part is on its servers alone."""
        ...

    @property
    def undirected(self) -> bool:
        """The reverse of every edge is added."""
        ...


def broken_rules(rows: RowsConfig, graphs: Sequence[SharedOut]) -> Iterator[str]:
    """Yield what is wrong with the section, and with how the graphs are shared out."""
    for index, graph in enumerate(graphs):
        if graph.share == "all" and graph.parts is None:
            yield f"graph[{index}].share: it needs parts"
        if graph.share == "all" and graph.undirected:
            yield f"graph[{index}].share: it needs both directions in the file, not undirected"
    if rows.listen is None:
        shared = [graph.name for graph in graphs if graph.parts is not None]
        if shared:
            yield f"cluster.rows.listen is missing, and graph '{shared[0]}' has parts"
        return
    host, _, port = rows.listen.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        yield f"cluster.rows.listen: '{rows.listen}' is not host:port"
    elif rows.key_file is None and not is_loopback(host):
        yield (
            f"cluster.rows.listen: '{host}' is reached by other machines; set cluster.rows.key_file"
        )
