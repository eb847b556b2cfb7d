"""A model's versions.toml: its rules for requests that name no version, kept beside its versions.

    shadow = 3                 optional; with shadow_percent = 10 for a tenth of the requests
    canary = 2                 optional, a version of the split

    [split]                    version = percent; without it the newest that loads answers all
    1 = 90
    2 = 10

    [previous]                 optional; the same keys: the rules before, for a roll back

The server writes the file when it is told other rules, so they outlast it. A change by hand counts
from the next load of the model.
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from serve.core.versions.rules import VersionRules
from serve.errors import ConfigError
from serve.toml_tables import Section, decode_table, read_toml

VERSIONS_FILE = "versions.toml"

_HEAD = """\
# Which versions of this model answer the requests that name none. The server writes this file.
# After a change by hand: gnnserve model load NAME
"""

_Version = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,17}$")]


class _Rules(Section, frozen=True):
    split: dict[_Version, float] = msgspec.field(default_factory=dict)
    canary: int | None = None
    shadow: int | None = None
    shadow_percent: float = 100.0


class _File(_Rules, frozen=True):
    previous: _Rules | None = None


class KeptRules(msgspec.Struct, frozen=True):
    """What the file holds: the rules, and those before them."""

    now: VersionRules = VersionRules()
    previous: VersionRules | None = None


def read_rules(folder: Path) -> KeptRules:
    """Read the file of a model's folder; raises ConfigError for a broken one."""
    path = folder / VERSIONS_FILE
    if not os.path.lexists(path):
        return KeptRules()
    found = decode_table(read_toml(path), _File, str(path))
    previous = None if found.previous is None else _rules(found.previous, f"{path}: previous")
    return KeptRules(_rules(found, str(path)), previous)


def write_rules(folder: Path, kept: KeptRules) -> None:
    """Replace the file of a model's folder, wholly or not at all; raises OSError."""
    lines = [_HEAD, *_lines(kept.now, "")]
    if kept.previous is not None:
        lines += ["", "[previous]", *_lines(kept.previous, "previous.")]
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{VERSIONS_FILE}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o644)
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(descriptor)
        os.replace(name, folder / VERSIONS_FILE)
    except BaseException:
        os.unlink(name)
        raise


def _lines(rules: VersionRules, prefix: str) -> list[str]:
    """Return the rules in TOML; `prefix` stands before the name of a table."""
    lines = []
    if rules.canary is not None:
        lines.append(f"canary = {rules.canary}")
    if rules.shadow is not None:
        lines += [f"shadow = {rules.shadow}", f"shadow_percent = {float(rules.shadow_percent)!r}"]
    if rules.shares:
        lines += ["", f"[{prefix}split]"]
        lines += [f"{version} = {float(percent)!r}" for version, percent in rules.shares]
    return lines


def _rules(found: _Rules, where: str) -> VersionRules:
    shares = sorted((int(version), percent) for version, percent in found.split.items())
    try:
        return VersionRules(tuple(shares), found.canary, found.shadow, found.shadow_percent)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
