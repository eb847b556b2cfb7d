"""Checks a weights file without torch: complete, in the safetensors format, floats in FP32.

A file that passes can be memory-mapped without reading past its end.
"""

import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from serve.errors import ConfigError
from serve.files import open_regular

#: Longest header accepted, that of some 100,000 tensors: it is read in the main process.
_MAX_HEADER_BYTES = 16 << 20
_LENGTH_BYTES = 8
#: safetensors' names of the types that weights and buffers may have.
_DTYPES = frozenset({"F32", "I64", "I32", "I16", "I8", "U8", "BOOL"})


def check_weights(path: Path, told_as: Path | None = None) -> None:
    """Raise ConfigError unless the weights file at `path` can be served.

    The error names the file (or `told_as`, if `path` is a copy of it) and what is wrong: the file
    is missing, no regular file, truncated, padded, malformed, or holds floats other than FP32.
    """
    named = told_as or path
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = file.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(length, "little")
            if header_bytes > _MAX_HEADER_BYTES:
                raise ConfigError(
                    f"{named}: not a safetensors file: header of {header_bytes} bytes"
                )
            dtypes = _read_dtypes(length + file.read(header_bytes), size_bytes)
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ConfigError(
            f"{named}: truncated, padded or not a safetensors file ({size_bytes} bytes): {reason}"
        ) from error
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise ConfigError(f"{named}: tensor '{name}' is {dtype}; weights must be F32")


def _read_dtypes(head: bytes, size_bytes: int) -> dict[str, str]:
    """Return the type of each tensor of a file of that size that begins with `head`.

    The library maps the file it reads, and touching a mapped file that was just cut kills the
    process. So it reads a sparse copy, in memory, of which only the header is there.
    """
    copy_fd = os.memfd_create("gnnserve-header", os.MFD_CLOEXEC)
    try:
        os.truncate(copy_fd, size_bytes)
        os.pwrite(copy_fd, head[:size_bytes], 0)
        with safe_open(f"/proc/self/fd/{copy_fd}", framework="numpy") as tensors:
            names = tensors.keys()
            return {name: tensors.get_slice(name).get_dtype() for name in names}
    finally:
        os.close(copy_fd)


def nonfinite_weights(path: Path) -> tuple[str, ...]:
    """Return the names of float tensors with values that are no finite numbers.

    `path` is a file that passed ``check_weights`` and that nobody changes.
    """
    with safe_open(path, framework="numpy") as tensors:
        arrays = ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
        return tuple(
            name
            for name, array in arrays
            if array.dtype.kind == "f"
            # The sum alone may leave the range.
            and not np.isfinite(array.sum())
            and not np.isfinite(array).all()
        )
