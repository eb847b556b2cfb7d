"""Credentials of gRPC's own server, which follow the files of the certificates."""

import logging

import grpc

from serve.access.certificates import Certificates
from serve.errors import ConfigError

_log = logging.getLogger(__name__)
_IGNORED = (
    "server.tls.client_ca: it lists revoked certificates, which gRPC's own front would let in; "
    "server.front = 'native' does not"
)


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials that begin each connection with the newest certificates.

    Raises ConfigError for a list of revoked certificates, which gRPC does not look at.
    """
    given = certificates.now
    if given.revokes:
        raise ConfigError(_IGNORED)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Return the newest certificates; None when gRPC has them already."""
        nonlocal given
        now = certificates.now
        if now is given:
            return None
        given = now
        if now.revokes:
            _log.error("the certificates stay as they were: %s", _IGNORED)
            return None
        return _configuration(certificates)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(certificates),
        newer,  # type: ignore[arg-type]  # the stubs do not know that it may return None
        certificates.files.client_ca is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    now = certificates.now
    return grpc.ssl_server_certificate_configuration(
        [(now.key, now.certificate)], now.client_ca or None
    )
