"""Changes to resident graphs on the wire: datatypes and shapes of their tensors.

Structure is checked here. Values (ids out of range, features that are NaN) are checked when the
change is applied.
"""

from math import prod
from typing import Any

import numpy as np

from serve.errors import InvalidInput
from serve.pb import gnnserve_pb2 as pb
from serve.wire.messages import DATATYPES
from serve.wire.protobuf import MOST_DIMENSIONS, check_head, parse

#: By tensor: its datatypes, the one it is stored in first, and its shape, -1 for a free dimension.
_TENSORS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "add_x": (("FP32",), (-1, -1)),
    "set_ids": (("INT64", "INT32"), (-1,)),
    "set_x": (("FP32",), (-1, -1)),
    "remove_edges": (("INT64", "INT32"), (2, -1)),
    "add_edges": (("INT64", "INT32"), (2, -1)),
}
_FIELDS = {pb.UpdateGraphRequest.DESCRIPTOR.fields_by_name[name].number for name in _TENSORS}


def parse_update(message: bytes) -> pb.UpdateGraphRequest:
    """Parse `message`; raises WireError when it is malformed or too large beside its tensors."""
    check_head(message, _FIELDS, pb.Tensor.DATA_FIELD_NUMBER)
    found: pb.UpdateGraphRequest = parse(pb.UpdateGraphRequest, message)
    return found


def decode_change(request: pb.UpdateGraphRequest) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of `request` by name; raises InvalidInput naming tensor and rule."""
    found = {
        name: _array(name, getattr(request, name), datatypes, shape)
        for name, (datatypes, shape) in _TENSORS.items()
        if request.HasField(name)
    }
    if not found:
        raise InvalidInput(f"nothing to change: give at least one of {', '.join(_TENSORS)}")
    return found


def _array(
    name: str, tensor: pb.Tensor, datatypes: tuple[str, ...], required: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    if tensor.datatype not in datatypes:
        raise InvalidInput(
            f"tensor '{name}': datatype {tensor.datatype or 'missing'}, but "
            f"{' or '.join(datatypes)} is required"
        )
    shape = tuple(tensor.shape[:MOST_DIMENSIONS])
    fits = len(shape) == len(required) and all(
        dim >= 0 and wanted in (-1, dim) for dim, wanted in zip(shape, required, strict=True)
    )
    if not fits:
        raise InvalidInput(
            f"tensor '{name}': shape {list(shape)}, but {list(required)} is required"
        )
    kind = DATATYPES[tensor.datatype]
    if len(tensor.data) != prod(shape) * kind.size:
        raise InvalidInput(
            f"tensor '{name}': {len(tensor.data)} bytes, but shape {list(shape)} of "
            f"{kind.name} needs {prod(shape) * kind.size}"
        )
    array = np.frombuffer(tensor.data, kind.dtype).reshape(shape)
    return array.astype(DATATYPES[datatypes[0]].dtype, copy=False)
