"""Whom calls come from, by their credentials: tokens, names of certificates, or nothing."""

import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from serve.access.principal import (
    ANYBODY,
    CLIENT_ROLES,
    EVERY_ROLE,
    SERVER,
    Principal,
    Role,
    Tenant,
)
from serve.access.rules import decide
from serve.access.tokens import TenantLimits, Token, TokensFile, read_tokens
from serve.access.watching import WatchedFiles
from serve.errors import ConfigError

_log = logging.getLogger(__name__)

#: Header with the credential of a call.
AUTHORIZATION = "authorization"
#: Headers between processes of one server: a secret that only they know, and the names of the
#: certificate that the client showed at the port.
INSIDE, PEER = "gnnserve-inside", "gnnserve-peer"
#: Between names in that header; a name that holds it is left out.
NAMES_SEPARATOR = ","
#: Longest header that is looked at.
_MOST_CHARACTERS = 1024
#: Most headers whose credential is remembered.
_MOST_RECENT = 1024

_NO_CREDENTIAL = "authorization: this call needs a token, as 'Bearer TOKEN', and carries none"
_UNKNOWN_TOKEN = "authorization: the token is not one of this server"
_NO_TOKEN = "authorization: it is neither 'Bearer TOKEN' nor Basic with a token as the password"


@dataclass(frozen=True, slots=True)
class _Known:
    """A credential of the tokens file."""

    principal: Principal
    #: Seconds since 1970 from which it is refused; None for never.
    expires_s: float | None
    expires: datetime | None
    digest: bytes = b""


class Callers:
    """Finds the principal of a call. Any thread may call any method."""

    def __init__(
        self,
        tokens_file: Path | None = None,
        *,
        open_roles: frozenset[Role] = EVERY_ROLE,
        certificates: bool = False,
        admin_on_port: bool = False,
        inside: str | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Read the tokens file; raises ConfigError when it cannot be used.

        Args:
            tokens_file: See ``tokens``; None: there are no tokens.
            open_roles: Roles of callers without credentials, on a server without credentials.
            certificates: Clients show certificates. Without a tokens file, each may do what
                clients do, under the first name of its certificate.
            admin_on_port: Administrators may use the ports, not the admin socket alone.
            inside: What the processes of this server show one another; None to make it up.
            clock_s: Returns the seconds since 1970.
        """
        self._file = tokens_file
        self._open_roles = open_roles
        self._certificates = certificates
        self._admin_on_port = admin_on_port
        self._clock_s = clock_s
        self._tokens: dict[bytes, _Known] = {}
        self._names: dict[str, _Known] = {}
        #: By the headers that were taken lately, which need no hash for that.
        self._recent: dict[str, _Known] = {}
        #: Limits of tenants, as the file has them now.
        self.tenants: tuple[TenantLimits, ...] = ()
        self._told: list[Callable[[tuple[TenantLimits, ...]], None]] = []
        #: When credentials were last looked at for having expired.
        self._looked_s = clock_s()
        #: Token of the server's own requests.
        self.own_token = secrets.token_urlsafe(32)
        #: What the processes of this server show one another.
        self.inside = inside or secrets.token_hex(16)
        #: For a ``FileWatcher``: empty without a tokens file.
        self.watched: tuple[WatchedFiles, ...] = ()
        if tokens_file is not None:
            # First, so that no change after the reading is missed.
            self.watched = (WatchedFiles((tokens_file,), self.reload, self._look_for_expired),)
            self._take(read_tokens(tokens_file))

    @property
    def limited(self) -> bool:
        """False when everybody may do everything."""
        return self.needs_credentials or self._open_roles != EVERY_ROLE

    @property
    def needs_credentials(self) -> bool:
        """True when calls need a token or a certificate."""
        return self._file is not None or self._certificates

    def on_change(self, told: Callable[[tuple[TenantLimits, ...]], None]) -> None:
        """Call `told` with the limits of tenants now, and whenever credentials may say otherwise.

        That is after a new file, and after one has expired, on the watcher's thread.
        """
        self._told.append(told)
        told(self.tenants)

    def reload(self) -> None:
        """Read the file again; keeps the credentials when it cannot be used, which is logged."""
        assert self._file is not None
        try:
            self._take(read_tokens(self._file))
        except ConfigError as error:
            _log.error("the tokens stay as they were: %s", error)
            return
        _log.info("read %d credentials of %s", len(self._tokens) + len(self._names), self._file)
        self._tell()

    def admit(
        self,
        method: str,
        metadata: Iterable[tuple[str, str | bytes]],
        names: Sequence[str] = (),
    ) -> Principal:
        """Return whom a call of `method` comes from; see ``of_metadata``.

        Raises NotIdentified or NotPermitted when they may not make it.
        """
        caller = self.of_metadata(metadata, names)
        if (error := decide(method, caller)) is not None:
            raise error
        return caller

    def find(self, authorization: str | None, names: Sequence[str] = ()) -> Principal:
        """Return whom a call comes from.

        Args:
            authorization: Its header of that name; None without.
            names: Subject alternative names of the certificate that its client showed.
        """
        if not self.needs_credentials and authorization is None:
            return self._opened()
        if authorization is not None:
            return self._of_token(authorization)
        for name in names:
            if (known := self._names.get(name)) is not None:
                return self._valid(known)
        if names and self._certificates and self._file is None:
            return Principal(names[0], CLIENT_ROLES, Tenant(names[0]))
        if names:
            return _nobody(f"certificate: none of its names is known: {', '.join(names)[:256]}")
        return _nobody(_NO_CREDENTIAL)

    def of_metadata(
        self, metadata: Iterable[tuple[str, str | bytes]], names: Sequence[str] = ()
    ) -> Principal:
        """Return whom a call with these headers comes from; see ``find``.

        Names of a certificate count too when another process of this server passes them on.
        """
        authorization: str | None = None
        inside = peer = ""
        for key, value in metadata:
            if not isinstance(value, str):
                continue
            if key == AUTHORIZATION:
                authorization = value
            elif key == INSIDE:
                inside = value
            elif key == PEER:
                peer = value
        if peer and hmac.compare_digest(inside.encode(), self.inside.encode()):
            names = peer.split(NAMES_SEPARATOR)
        return self.find(authorization, names)

    def _opened(self) -> Principal:
        return ANYBODY if self._open_roles == EVERY_ROLE else Principal("", self._open_roles)

    def _of_token(self, authorization: str) -> Principal:
        # Like that of hashes below, its time tells of the hashes of whole headers alone.
        recent = self._recent
        if (known := recent.get(authorization)) is not None:
            return self._valid(known)
        encoded = _token_in(authorization)
        if encoded and hmac.compare_digest(encoded, self.own_token.encode()):
            return SERVER
        if not self.needs_credentials:
            return self._opened()
        if not encoded:
            return _nobody(_NO_TOKEN)
        digest = hashlib.sha256(encoded).digest()
        # The time of the look-up tells of hashes alone, from which nobody gets to a token.
        known = self._tokens.get(digest)
        if known is None or not hmac.compare_digest(known.digest, digest):
            return _nobody(_UNKNOWN_TOKEN)
        if len(recent) < _MOST_RECENT and len(authorization) <= _MOST_CHARACTERS:
            recent[authorization] = known
        return self._valid(known)

    def _valid(self, known: _Known) -> Principal:
        if known.expires_s is not None and self._clock_s() >= known.expires_s:
            return _nobody(f"authorization: the credential has expired, at {known.expires}")
        return known.principal

    def _look_for_expired(self) -> None:
        before_s, self._looked_s = self._looked_s, self._clock_s()
        # A clock that is set back makes what has expired valid again.
        first_s, last_s = sorted((before_s, self._looked_s))
        known = (*self._tokens.values(), *self._names.values())
        if any(one.expires_s is not None and first_s < one.expires_s <= last_s for one in known):
            self._tell()

    def _tell(self) -> None:
        for told in self._told:
            told(self.tenants)

    def _take(self, content: TokensFile) -> None:
        limits = {tenant.name: tenant for tenant in content.tenant}
        tokens: dict[bytes, _Known] = {}
        names: dict[str, _Known] = {}
        for row in content.token:
            known = self._known(row, limits)
            if row.hash is not None:
                tokens[known.digest] = known
            if row.certificate is not None:
                names[row.certificate] = known
        self._tokens, self._names, self.tenants = tokens, names, content.tenant
        # Last: whoever has the new one looks at the new tokens.
        self._recent = {}

    def _known(self, row: Token, limits: dict[str, TenantLimits]) -> _Known:
        roles = frozenset(Role(role) for role in row.roles)
        if Role.ADMIN in roles:
            roles = EVERY_ROLE if self._admin_on_port else CLIENT_ROLES
        name = row.tenant_name
        limit = limits.get(name, TenantLimits(name=name))
        tenant = Tenant(name, limit.highest_priority, limit.min_qos_target_us)
        return _Known(
            Principal(row.principal, roles, tenant),
            None if row.expires is None else row.expires.timestamp(),
            row.expires,
            b"" if row.hash is None else bytes.fromhex(row.hash.partition(":")[2]),
        )


def _token_in(authorization: str) -> bytes:
    """Return the token of a header; empty when there is none, or it is too long.

    Browsers ask for a name and a password, which is the token.
    """
    scheme, _, value = authorization[:_MOST_CHARACTERS].partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip().encode("utf-8", "replace")
        case "basic":
            try:
                return base64.b64decode(value, validate=True).partition(b":")[2]
            except ValueError:
                return b""
    return b""


def _nobody(problem: str) -> Principal:
    return Principal("", frozenset(), problem=problem)
