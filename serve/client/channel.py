"""Where a server is and how to reach it: target, encryption, token and metadata."""

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import grpc

#: Port of a target that names none, by scheme; the empty scheme is plain `host:port`.
_PORTS = {"https": 443, "http": 80, "grpcs": 443, "grpc": 8001, "": 8001}
_ENCRYPTED = ("https", "grpcs")
#: Schemes of gRPC's own name resolvers, passed on as they are.
_RESOLVERS = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")
_KEY = re.compile(r"[0-9a-z_.-]+")
_BEGIN = b"-----BEGIN "

#: A token, or a function that returns the one to use now.
Token = str | Callable[[], str]
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files for an encrypted connection."""

    #: Certificates of the authorities to trust; None for the public ones that come with gRPC.
    ca_file: str | os.PathLike[str] | None = None
    #: Certificate of this client and its private key, for servers that ask for one.
    certificate_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    #: Name that the server's certificate is for, if it is not the target's host.
    server_name: str = ""


#: What to encrypt with: gRPC's own object, files, or the path of `ca_file` alone.
Credentials = grpc.ChannelCredentials | TlsFiles | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Address:
    """A server and what every call to it carries."""

    #: As gRPC writes it.
    target: str
    #: None when the connection is not encrypted.
    credentials: grpc.ChannelCredentials | None
    options: list[tuple[str, int | str]]
    _metadata: Metadata = ()
    _token: Token | None = field(default=None, repr=False)

    def metadata(self) -> Metadata:
        """Return what to send with a call that begins now."""
        if self._token is None:
            return self._metadata
        token = self._token if isinstance(self._token, str) else self._token()
        return (*self._metadata, ("authorization", f"Bearer {token}"))


def address_of(
    target: str,
    *,
    credentials: Credentials | None = None,
    token: Token | None = None,
    metadata: Mapping[str, str | bytes] | None = None,
    max_message_bytes: int,
) -> Address:
    """Return the server's address; see ``AsyncClient`` for the arguments.

    Raises ValueError for arguments that contradict each other, and OSError for a file that cannot
    be read.
    """
    scheme, host, address = _split(target)
    encrypted = scheme in _ENCRYPTED or credentials is not None
    if credentials is not None and scheme in ("http", "grpc"):
        raise ValueError(
            f"target {target!r}: {scheme}:// is not encrypted, but credentials are given"
        )
    if token is not None and not encrypted and scheme == "" and not _is_local(host):
        raise ValueError(
            f"target {target!r}: a token would be sent unencrypted; write https://{address},"
            f" or http://{address} if the network is trusted"
        )
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
    if _is_local(host):
        options.append(("grpc.enable_http_proxy", 0))
    if isinstance(credentials, TlsFiles) and credentials.server_name:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    return Address(
        address,
        _channel_credentials(credentials) if encrypted else None,
        options,
        _checked(metadata or {}),
        token,
    )


def _split(target: str) -> tuple[str, str, str]:
    """Return scheme, host and gRPC's form of a target; raises ValueError."""
    if target.startswith(_RESOLVERS):
        local = target.startswith("unix")
        return "", "localhost" if local else target.partition(":")[2].lstrip("/"), target
    scheme, mark, rest = target.partition("://")
    if not mark:
        scheme, rest = "", target
    if scheme not in _PORTS:
        known = ", ".join(f"{name}://" for name in _PORTS if name)
        raise ValueError(f"target {target!r}: unknown scheme {scheme}://; known: {known}")
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"target {target!r}: {error}") from error
    if not host:
        raise ValueError(f"target {target!r}: it names no host")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"target {target!r}: expected [scheme://]host[:port] and nothing else")
    name = f"[{host}]" if ":" in host else host
    return scheme, host, f"{name}:{_PORTS[scheme] if port is None else port}"


def _is_local(host: str) -> bool:
    """Return True for this machine's loopback addresses."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _channel_credentials(given: Credentials | None) -> grpc.ChannelCredentials:
    if isinstance(given, grpc.ChannelCredentials):
        return given
    files = given if isinstance(given, TlsFiles) else TlsFiles(ca_file=given)
    if (files.certificate_file is None) != (files.key_file is None):
        raise ValueError("credentials: certificate_file and key_file go together")
    return grpc.ssl_channel_credentials(
        root_certificates=_pem(files.ca_file),
        private_key=_pem(files.key_file),
        certificate_chain=_pem(files.certificate_file),
    )


def _pem(path: str | os.PathLike[str] | None) -> bytes | None:
    """Return a file's content; raises ValueError when it is no PEM, which gRPC would not tell."""
    if path is None:
        return None
    content = Path(path).read_bytes()
    if _BEGIN not in content:
        raise ValueError(f"credentials: {os.fspath(path)} is not in PEM format")
    return content


def _checked(metadata: Mapping[str, str | bytes]) -> Metadata:
    """Return metadata with keys in lower case; raises ValueError for what gRPC cannot send."""
    found: list[tuple[str, str | bytes]] = []
    for key, value in metadata.items():
        name = key.lower()
        if not _KEY.fullmatch(name) or name.startswith("grpc-"):
            raise ValueError(
                f"metadata {key!r}: a key has letters, digits, '_', '-', '.' and does"
                " not begin with 'grpc-'"
            )
        if isinstance(value, bytes) != name.endswith("-bin"):
            raise ValueError(
                f"metadata {key!r}: bytes need a key that ends in '-bin', and text one"
                " that does not"
            )
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            raise ValueError(f"metadata {key!r}: text must be printable ASCII")
        found.append((name, value))
    return tuple(found)
