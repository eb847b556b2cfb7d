"""The file by which servers know who holds which part of a graph that is shared out.

A line for each: `host:port PART`. Empty lines and what follows `#` say nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from serve.errors import ConfigError
from serve.files import read_named_text, replace_file

#: Most servers of a graph, and most bytes of the file that names them.
MOST_STORES, _MOST_FILE_BYTES = 256, 1 << 16


def read_stores(file: Path) -> dict[str, int]:
    """Return the part of each server that the file names; raises ConfigError."""
    found: dict[str, int] = {}
    lines = read_named_text(file, _MOST_FILE_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, _, port = words[0].rpartition(":")
        if len(words) != 2 or not (host and port.isdecimal() and words[1].isdecimal()):
            raise ConfigError(f"{file}:{number}: expected host:port and the number of a part")
        if words[0] in found:
            raise ConfigError(f"{file}:{number}: {words[0]} is named twice")
        found[words[0]] = int(words[1])
    if not 1 <= len(found) <= MOST_STORES:
        raise ConfigError(f"{file}: {len(found)} servers, expected 1 to {MOST_STORES}")
    return found


def write_stores(file: Path, stores: Sequence[tuple[str, int]]) -> None:
    """Replace the file; raises OSError."""
    replace_file(file, "".join(f"{address} {part}\n" for address, part in stores).encode())
