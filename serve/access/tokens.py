"""The tokens file: who has which credential, roles and tenant, and the limits of tenants.

It is TOML. A token is kept as its SHA-256 hash, so whoever reads the file cannot use it. The values
are 256 random bits, which need no slow hash.
"""

import fcntl
import hashlib
import json
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serve.errors import ConfigError
from serve.toml_tables import Section, decode_table, read_toml

_PREFIX = "gnn_"
#: Time for another command to change the file, and between two looks whether it has.
_PATIENCE_S, _LOOK_S = 10.0, 0.02
_HASH = "sha256:"
_HEAD = "# Written by `gnnserve token`, which does not keep comments. Tokens are SHA-256 hashes.\n"

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class Token(Section, frozen=True):
    """Table `[[token]]`: a credential, its roles and its tenant."""

    #: Name of whom the credential belongs to, in logs and as owner of shared memory.
    principal: Name
    roles: Annotated[tuple[Literal["infer", "observe", "admin"], ...], Meta(min_length=1)]
    #: `sha256:` and the token's hash in hexadecimal digits; or a certificate instead.
    hash: Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")] | None = None
    #: Subject alternative name of a client's certificate.
    certificate: Name | None = None
    #: None: the principal is its own tenant.
    tenant: Name | None = None
    #: Time, with its offset, from which the credential is refused.
    expires: Annotated[datetime, Meta(tz=True)] | None = None

    @property
    def tenant_name(self) -> str:
        """Name of its tenant."""
        return self.tenant or self.principal


class TenantLimits(Section, frozen=True):
    """Table `[[tenant]]`: limits of one tenant; None for no limit."""

    name: Name
    #: Share of the lanes under load, in proportion to the other tenants' weights.
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    #: Most requests accepted and not yet answered.
    max_in_queue: Annotated[int, Meta(ge=1)] | None = None
    requests_per_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    #: The most urgent priority: 1 is the most urgent of all.
    highest_priority: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    #: Smallest `qos_target_us` that a request may ask for.
    min_qos_target_us: Annotated[int, Meta(ge=1)] | None = None


class TokensFile(Section, frozen=True):
    """The whole file."""

    token: tuple[Token, ...] = ()
    tenant: tuple[TenantLimits, ...] = ()


def new_token() -> str:
    """Return a token that nobody can guess."""
    return _PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """Return a token's hash as the file holds it."""
    return _HASH + hashlib.sha256(token.encode()).hexdigest()


def read_tokens(path: Path) -> TokensFile:
    """Read the file; raises ConfigError with every mistake, and when others could have written it.

    Others are all but the file's owner.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{path}: its mode is {stat.S_IMODE(mode):04o}, but only its owner may write it; "
            f"chmod go-w {path}"
        )
    found = decode_table(read_toml(path), TokensFile, str(path))
    problems = list(_broken_rules(found))
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return found


@contextmanager
def changing_tokens(path: Path) -> Iterator[None]:
    """Keep other commands from changing the file within the block.

    Otherwise one could write a credential again that another one revokes meanwhile. Raises
    ConfigError when the file's folder is missing, or when another command takes too long.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    give_up_s = time.monotonic() + _PATIENCE_S
    try:
        while not _is_locked(folder):
            if time.monotonic() > give_up_s:
                raise ConfigError(f"{path}: another command changes files of this folder")
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(folder)


def _is_locked(folder: int) -> bool:
    """Take the lock of a folder that is open, unless another process has it."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_tokens(path: Path, content: TokensFile) -> None:
    """Replace the file at once; raises ConfigError when impossible.

    A new file is readable by its owner alone. Another one keeps its owner, group and mode: root may
    change the file of a server that runs as another user. Whoever reads meanwhile finds the old
    content or the new.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        before = path.stat() if path.exists() else None
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                if before is not None:
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
                file.write(text_of(content))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def text_of(content: TokensFile) -> str:
    """Return the file's text."""
    lines = [_HEAD]
    tables = [("token", row) for row in content.token]
    tables += [("tenant", row) for row in content.tenant]  # type: ignore[misc]
    for table, row in tables:
        lines.append(f"[[{table}]]")
        for field in msgspec.structs.fields(row):
            value = getattr(row, field.name)
            if value != field.default:
                lines.append(f"{field.name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # Escapes of JSON are escapes of TOML, but for DEL, which JSON writes as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _broken_rules(found: TokensFile) -> Iterator[str]:
    for index, token in enumerate(found.token):
        if (token.hash is None) == (token.certificate is None):
            both = "both given" if token.hash is not None else "both missing"
            yield f"token[{index}].hash and token[{index}].certificate are {both}; give one"
        yield from (f"token[{index}].{problem}" for problem in unprinted_names(token))
    for index, tenant in enumerate(found.tenant):
        yield from (f"tenant[{index}].{problem}" for problem in unprinted_names(tenant))
    yield from _twice("token: the hash", (token.hash for token in found.token))
    yield from _twice("token: the certificate", (token.certificate for token in found.token))
    yield from _twice("tenant: the name", (tenant.name for tenant in found.tenant))


def unprinted_names(row: Token | TenantLimits) -> Iterator[str]:
    """Yield the row's names with characters that do not show: logs and reports have these names."""
    for field in ("principal", "certificate", "tenant", "name"):
        value = getattr(row, field, None)
        if value is not None and not value.isprintable():
            yield f"{field}: {value!r} has characters that do not show"


def _twice(what: str, values: Iterable[str | None]) -> Iterator[str]:
    counts = Counter(value for value in values if value is not None)
    return (f"{what} '{value}' is given more than once" for value, n in counts.items() if n > 1)
