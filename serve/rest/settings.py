"""Settings that the main process passes to the gateway."""

import msgspec

from serve.access.certificates import CertificateFiles
from serve.access.settings import AccessSettings

#: Variable of the environment with the secret of the server's processes.
INSIDE_VARIABLE = "GNNSERVE_INSIDE"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one gateway process; file descriptors are those that it inherits."""

    #: Listening socket of the HTTP port.
    listener_fd: int
    #: Socket to the main process; see ``serve.rest.lifeline``.
    lifeline_fd: int
    #: Address of the gRPC port, as gRPC writes it.
    grpc_target: str
    #: Name of the abstract Unix socket with health, metrics and report.
    http_backend: str
    #: Largest body, and largest gRPC message.
    max_message_bytes: int
    #: Time for a request's head to arrive, and again for its body.
    receive_timeout_s: float
    #: How to tell callers apart.
    access: AccessSettings = AccessSettings()
    #: For encrypted connections; None for others.
    certificates: CertificateFiles | None = None
    #: Database of the report, for the live page; empty for none.
    database: str = ""
    #: Lowest level that is logged.
    log_level: str = "INFO"
    #: Standard error is a pipe to the main process, which writes the log.
    log_to_pipe: bool = False
