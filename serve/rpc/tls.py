"""Credentials of gRPC's own server, which follow the files of the certificates."""

import grpc

from serve.access.certificates import Certificates


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials that begin each connection with the newest certificates."""
    given = certificates.now

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Return the newest certificates; None when gRPC has them already."""
        nonlocal given
        now = certificates.now
        if now is given:
            return None
        given = now
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
