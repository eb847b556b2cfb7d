"""The file by which a front learns which servers there are.

A line for each: `host:port`, and ` drained` after it when it gets no new requests. Empty lines and
what follows `#` say nothing. Whoever changes the file replaces it, so that no reader sees half.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from serve.errors import ConfigError
from serve.files import read_named_text, replace_file

_MOST_BYTES = 1 << 20
_DRAINED = "drained"


def read_servers(file: Path) -> tuple[list[str], list[str]]:
    """Return all servers, and those that are drained; raises ConfigError."""
    lines = read_named_text(file, _MOST_BYTES).splitlines()
    servers, drained = [], []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or words[1:] not in ([], [_DRAINED]):
            raise ConfigError(f"{file}:{number}: expected host:port and perhaps '{_DRAINED}'")
        servers.append(words[0])
        if words[1:]:
            drained.append(words[0])
    return servers, drained


def write_servers(file: Path, servers: Sequence[str], drained: Collection[str] = ()) -> None:
    """Replace the file; raises OSError."""
    lines = [f"{server} {_DRAINED}" if server in drained else server for server in servers]
    replace_file(file, "".join(f"{line}\n" for line in lines).encode())
