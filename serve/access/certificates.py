"""The server's certificate, its key and the authorities of clients: files that may change."""

import logging
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from serve.access.callers import NAMES_SEPARATOR
from serve.access.watching import WatchedFiles
from serve.errors import ConfigError

_log = logging.getLogger(__name__)

#: Begins a list of revoked certificates, which lies beside those of the authorities.
_REVOKED = b"-----BEGIN X509 CRL-----"
#: Kinds of alternative names that are principals.
_KINDS = ("DNS", "URI", "email")


class CertificateFiles(msgspec.Struct, frozen=True):
    """Files in PEM format, by their absolute paths."""

    certificate: str
    key: str
    #: Certificates of the authorities whose clients may connect; None: any client may.
    client_ca: str | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        names = (self.certificate, self.key, self.client_ca)
        return tuple(Path(name) for name in names if name is not None)

    def load(self) -> "LoadedCertificates":
        """Read the files; raises ConfigError for one that is missing, wrong or does not fit."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # No session is resumed. TLS 1.3 would keep two of each connection, up to 20,480 in all.
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 0
        texts = {}
        for key, name in msgspec.structs.asdict(self).items():
            try:
                texts[key] = b"" if name is None else Path(name).read_bytes()
            except OSError as error:
                raise ConfigError(f"server.tls.{key}: {name}: {error.strerror}") from error
        try:
            # Without a password, it would ask the terminal for one.
            context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"server.tls.certificate: {self.certificate} with the key {self.key}: "
                f"{_reason(error)}"
            ) from error
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(
                    f"server.tls.client_ca: {self.client_ca}: {_reason(error)}"
                ) from error
        found = LoadedCertificates(context, texts["certificate"], texts["key"], texts["client_ca"])
        if found.revokes:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        return found


class LoadedCertificates(msgspec.Struct, frozen=True):
    """The files' content, read at one moment and checked."""

    context: ssl.SSLContext
    certificate: bytes
    key: bytes
    #: Empty where any client may connect.
    client_ca: bytes

    @property
    def revokes(self) -> bool:
        """True when the authorities say which certificates they have revoked."""
        return _REVOKED in self.client_ca


class Certificates:
    """The newest sound content of the files. Any thread may call any method."""

    def __init__(self, files: CertificateFiles) -> None:
        """Read the files; raises ConfigError when they cannot be used."""
        self.files = files
        #: For a ``FileWatcher``. First, so that no change after the reading is missed.
        self.watched = WatchedFiles(files.paths, self.reload)
        #: What new connections get.
        self.now = files.load()
        self._told: list[Callable[[], None]] = []

    def on_change(self, told: Callable[[], None]) -> None:
        """Call `told` after each change, on the watcher's thread."""
        self._told.append(told)

    def reload(self) -> None:
        """Read the files again; keeps the content when they cannot be used, which is logged."""
        try:
            self.now = self.files.load()
        except ConfigError as error:
            _log.error("the certificates stay as they were: %s", error)
            return
        _log.info("read the certificates anew: %s", self.files.certificate)
        for told in self._told:
            told()


class CurrentContext(ssl.SSLContext):
    """A context for asyncio that begins each connection with the newest certificates."""

    certificates: Certificates

    @classmethod
    def of(cls, certificates: Certificates) -> "CurrentContext":
        """Return a context that follows `certificates`."""
        found = cls(ssl.PROTOCOL_TLS_SERVER)
        found.certificates = certificates
        return found

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """See ``ssl.SSLContext``."""
        return self.certificates.now.context.wrap_bio(*arguments, **options)


def names_of(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the alternative names in what `getpeercert` returns."""
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(value for kind, value in names if kind in _KINDS and NAMES_SEPARATOR not in value)


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror
    return str(reason or error).replace("_", " ").lower()
