"""The header of a safetensors file, read and checked without torch.

Layout (https://huggingface.co/docs/safetensors): eight bytes, little-endian, the length of the
header; the header, a JSON object of name -> dtype, shape, data_offsets; then the data, without
holes. A file that passes here can be memory-mapped without reading past its end.
"""

import math
import os
import struct
from pathlib import Path

import msgspec

from serve.errors import ConfigError
from serve.files import open_regular

#: Longest header taken, that of some 100,000 tensors: the main process reads it, with others
#: waiting.
_MAX_HEADER_BYTES = 16 << 20
#: Most dimensions of a tensor.
_MAX_RANK = 8
_ITEM_BYTES = {"F32": 4, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_OTHER_FLOATS = ("F64", "F16", "BF16", "F8_E4M3", "F8_E5M2")


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the file; `data_offsets` are [begin, end) after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path, told_as: Path | None = None) -> dict[str, TensorEntry]:
    """The tensors stored in the file at `path`.

    Raises ConfigError, naming the file (or `told_as`, of which it is a copy) and the rule it
    breaks, for a file that is missing, cut short, not a regular file, not in the format, or holds
    floats other than FP32.
    """
    named = told_as or path
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ConfigError(f"{named}: not a safetensors file: {size_bytes} bytes in all")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > _MAX_HEADER_BYTES:
                raise ConfigError(
                    f"{named}: not a safetensors file: header of {header_bytes} bytes"
                )
            header = file.read(header_bytes)
    except OSError as error:
        raise ConfigError(f"{named}: cannot be read: {error.strerror}") from error
    if len(header) < header_bytes:
        raise ConfigError(
            f"{named}: truncated: {header_bytes} bytes of header announced, {len(header)} there"
        )
    entries = _decode(header, named)
    _check_data(entries, size_bytes - 8 - header_bytes, named)
    return entries


def _decode(header: bytes, path: Path) -> dict[str, TensorEntry]:
    """The header's entries, less the free-form metadata."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a safetensors file: header: {error}") from error


def _check_data(entries: dict[str, TensorEntry], data_bytes: int, path: Path) -> None:
    """Every tensor's bytes are there, have the size its shape says, and leave no hole."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype in _OTHER_FLOATS:
            raise ConfigError(f"{path}: tensor '{name}' is {entry.dtype}; weights must be F32")
        if entry.dtype not in _ITEM_BYTES:
            raise ConfigError(f"{path}: tensor '{name}' has the unknown type {entry.dtype!r}")
        if len(entry.shape) > _MAX_RANK:
            raise ConfigError(
                f"{path}: tensor '{name}' has {len(entry.shape)} dimensions, at most {_MAX_RANK}"
                " may be"
            )
        begin, stop = entry.data_offsets
        expected = math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]
        if min(entry.shape, default=0) < 0 or begin != end or stop - begin != expected:
            raise ConfigError(
                f"{path}: tensor '{name}': {entry.dtype}{list(entry.shape)} takes {expected} bytes"
                f" from offset {end}, the header says {begin} to {stop}"
            )
        end = stop
    if end != data_bytes:
        rule = "truncated" if data_bytes < end else "not a safetensors file"
        raise ConfigError(f"{path}: {rule}: {end} bytes of tensors announced, {data_bytes} there")
