"""The section of the configuration about other servers, see ``config``."""

from serve.toml_tables import Section


class ClusterConfig(Section, frozen=True):
    """Section `[cluster]`: other servers, which may answer a request in place of this one."""

    #: File that names the servers, `host:port` in each line, this one too or not; read again when
    #: it changes. What this server cannot hold or would answer late is passed on, once. None: no.
    servers_file: str | None = None
    #: Name of this server in answers; None: the host's name and the gRPC port.
    name: str | None = None
    #: File with the key of the front, which alone may tell when it got a request.
    front_key_file: str | None = None
