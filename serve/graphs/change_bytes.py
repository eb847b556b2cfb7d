"""Changes of a graph as bytes, for a log and for other servers."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from serve.errors import InvalidInput
from serve.graphs.updates import Change
from serve.undecodable import UNDECODABLE

#: Dtype of each tensor of a change, and its shape, -1 where any size may be.
_TENSORS: dict[str, tuple[type, tuple[int, ...]]] = {
    "add_x": (np.float32, (-1, -1)),
    "set_ids": (np.int64, (-1,)),
    "set_x": (np.float32, (-1, -1)),
    "remove_edges": (np.int64, (2, -1)),
    "add_edges": (np.int64, (2, -1)),
}
_Found = dict[str, tuple[tuple[int, ...], bytes]]


def encode_change(change: Change) -> bytes:
    """Return the change as bytes."""
    found: _Found = {}
    for name, (dtype, _) in _TENSORS.items():
        array = getattr(change, name)
        if array is not None:
            found[name] = array.shape, np.ascontiguousarray(array, dtype).tobytes()
    return msgspec.msgpack.encode(found)


def decode_change(data: bytes) -> Change:
    """Return the change that `encode_change` made `data` of; raises InvalidInput."""
    try:
        found = msgspec.msgpack.decode(data, type=_Found)
        return Change(**{name: _array(name, *each) for name, each in found.items()})
    except (KeyError, ValueError, *UNDECODABLE) as error:
        raise InvalidInput(f"what was sent is no change: {error}") from None


def _array(name: str, shape: tuple[int, ...], data: bytes) -> NDArray[Any]:
    dtype, wanted = _TENSORS[name]
    fits = len(shape) == len(wanted) and all(
        size >= 0 and rule in (-1, size) for size, rule in zip(shape, wanted, strict=True)
    )
    if not fits:
        raise ValueError(f"'{name}' has the shape {list(shape)}, not {list(wanted)}")
    return np.frombuffer(data, dtype).reshape(shape)
