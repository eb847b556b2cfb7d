"""Elements of tensors as JSON: read into their datatype, and written."""

from collections.abc import Sequence
from http import HTTPStatus
from math import prod

import msgspec
import numpy as np

from serve import native
from serve.rest.errors import RestError, invalid
from serve.undecodable import UNDECODABLE
from serve.wire.messages import DATATYPES, Datatype
from serve.wire.protobuf import MOST_DIMENSIONS

_FP16, _FP32 = np.dtype("<f2"), np.dtype("<f4")
_BF16 = "BF16"


def datatype_of(name: str, tensor: str) -> Datatype:
    """Return the datatype `name` of the tensor `tensor`; raises RestError if there is none."""
    kind = DATATYPES.get(name)
    if kind is None:
        raise invalid(f"tensor '{tensor}': datatype {name!r} is not one of {', '.join(DATATYPES)}")
    return kind


def read_elements(
    text: memoryview, kind: Datatype, shape: Sequence[int], tensor: str, most_bytes: int
) -> memoryview:
    """Read a JSON list of elements, nested by `shape` or flat.

    Returns the elements row-major and little-endian. Raises RestError, which names `tensor`, for
    other nesting or count, a value that the datatype cannot hold, more than `most_bytes`, and more
    than `MOST_DIMENSIONS` dimensions.
    """
    # Before anything is done for each: lists are read as deep as the shape says.
    if len(shape) > MOST_DIMENSIONS:
        raise invalid(
            f"tensor '{tensor}': its shape has {len(shape)} dimensions, at most "
            f"{MOST_DIMENSIONS} are taken"
        )
    if not all(0 <= size < 2**63 for size in shape):
        raise invalid(f"tensor '{tensor}': a size of its shape is not in [0, 2^63)")
    count = prod(shape)
    # Every element takes a byte of text at least, so a short text can claim no large array.
    if count > len(text):
        raise invalid(f"tensor '{tensor}': data has fewer elements than shape {list(shape)} needs")
    if count * max(kind.size, 1) > most_bytes:
        raise invalid(
            f"tensor '{tensor}': {kind.name} of shape {list(shape)} takes "
            f"{count * max(kind.size, 1)} bytes, and a message at most {most_bytes}"
        )
    if kind.name == "BYTES":
        return _read_texts(text, shape, tensor)
    if kind.dtype is None:
        raise invalid(f"tensor '{tensor}': {kind.name} has no form in JSON; send it as binary")
    read_as = _FP32 if kind.dtype == _FP16 else kind.dtype
    array = np.empty(count, read_as)
    try:
        native.read_json_list(text, read_as, shape, array)
    except ValueError as error:
        raise invalid(f"tensor '{tensor}': data: {error}") from error
    if read_as is not kind.dtype:
        with np.errstate(over="ignore"):
            array = array.astype(kind.dtype)
        if not np.isfinite(array).all():
            raise invalid(f"tensor '{tensor}': data: a number does not fit {kind.name}")
    return array.view(np.uint8).data


def write_elements(
    raw: memoryview, kind: Datatype, shape: Sequence[int], tensor: str, *, nested: bool = False
) -> bytes:
    """Return elements as a JSON list, flat or nested by `shape`.

    Raises RestError with NOT_ACCEPTABLE for elements that JSON cannot hold.
    """
    if kind.dtype is None:
        raise _not_json(tensor, f"{kind.name} has no form in JSON")
    array = np.frombuffer(raw, kind.dtype)
    if kind.dtype == _FP16:
        array = array.astype(_FP32)
    try:
        return native.write_json_list(
            array, array.dtype, shape if nested and shape else [array.size]
        )
    except ValueError as error:
        raise _not_json(tensor, str(error)) from error


def _not_json(tensor: str, reason: str) -> RestError:
    return RestError(
        HTTPStatus.NOT_ACCEPTABLE,
        f"output '{tensor}' cannot be written as JSON: {reason}; ask for it with "
        "the parameter binary_data",
    )


def _read_texts(text: memoryview, shape: Sequence[int], tensor: str) -> memoryview:
    """Read a flat list of strings; each becomes its length in four bytes, and its UTF-8."""
    try:
        texts = msgspec.json.decode(text, type=list[str])
    except UNDECODABLE as error:
        raise invalid(f"tensor '{tensor}': data: {error}; BYTES is a flat list") from error
    if len(texts) != prod(shape):
        raise invalid(
            f"tensor '{tensor}': {len(texts)} elements, but shape {list(shape)} needs {prod(shape)}"
        )
    encoded = (one.encode() for one in texts)
    return memoryview(b"".join(len(one).to_bytes(4, "little") + one for one in encoded))
