"""Reads files with torch in a process of its own, as the command line has no torch."""

import subprocess
import sys
from typing import TypeVar

import msgspec

from serve.errors import ModelError

#: Time limit for reading a file, and for building a model from it.
READ_S = 300.0
FoundT = TypeVar("FoundT", bound=msgspec.Struct)


def read_apart(module: str, order: msgspec.Struct, source: str, kind: type[FoundT]) -> FoundT:
    """Have `module` carry out the order about file `source`; return what it tells.

    Raises ModelError when it does not end, or ends without telling anything.
    """
    command = [sys.executable, "-P", "-m", "serve.lane.reader", module]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(order), stdout=subprocess.PIPE, timeout=READ_S
        )
        return msgspec.json.decode(done.stdout, type=kind)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{source}: not read within {READ_S:g} s") from error
    except msgspec.DecodeError as error:
        raise ModelError(
            f"{source}: the process that read it ended with code {done.returncode}"
        ) from error
