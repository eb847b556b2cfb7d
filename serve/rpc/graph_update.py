"""Changes to resident graphs on the wire: names, datatypes and shapes of their tensors.

Structure is checked here. Values (ids out of range, features that are NaN) are checked when the
change is applied.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np

from serve.errors import InvalidInput
from serve.graphs.typed_updates import IDS, TypedChange
from serve.graphs.updates import Change
from serve.interface import DTYPES
from serve.pb import gnnserve_pb2 as pb
from serve.typed_names import name_parts
from serve.wire.messages import DATATYPES
from serve.wire.protobuf import MOST_DIMENSIONS, check_head, parse

_Array = np.ndarray[Any, Any]
#: By tensor: its datatypes, the one it is stored in first, and its shape, -1 for a free dimension.
_TENSORS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "add_x": (("FP32",), (-1, -1)),
    "set_ids": (("INT64", "INT32"), (-1,)),
    "set_x": (("FP32",), (-1, -1)),
    "remove_edges": (("INT64", "INT32"), (2, -1)),
    "add_edges": (("INT64", "INT32"), (2, -1)),
}
#: Field of the tensors of a graph with several types.
_TYPED = "tensors"
_FIELDS = {
    pb.UpdateGraphRequest.DESCRIPTOR.fields_by_name[name].number for name in (*_TENSORS, _TYPED)
}


def parse_update(message: bytes) -> pb.UpdateGraphRequest:
    """Parse `message`; raises WireError when it is malformed or too large beside its tensors."""
    check_head(message, _FIELDS, pb.Tensor.DATA_FIELD_NUMBER)
    found: pb.UpdateGraphRequest = parse(pb.UpdateGraphRequest, message)
    return found


def decode_change(request: pb.UpdateGraphRequest) -> Change | TypedChange:
    """Return the change that `request` asks for; raises InvalidInput naming tensor and rule."""
    found = {
        name: _array(name, getattr(request, name), datatypes, shape)
        for name, (datatypes, shape) in _TENSORS.items()
        if request.HasField(name)
    }
    if request.tensors and found:
        raise InvalidInput(f"'{_TYPED}' is given beside {', '.join(found)}; a graph takes either")
    if request.tensors:
        return _typed_change(request.tensors)
    if not found:
        raise InvalidInput(
            f"nothing to change: give at least one of {', '.join((*_TENSORS, _TYPED))}"
        )
    return Change(**found)


def _typed_change(tensors: Iterable[pb.Tensor]) -> TypedChange:
    """Return the change by types, from tensors whose names say what each is."""
    nodes: dict[str, dict[str, dict[str, _Array]]] = {"add_nodes": {}, "set_nodes": {}}
    edges: dict[str, dict[str, _Array]] = {"remove_edges": {}, "add_edges": {}}
    for tensor in tensors:
        kind, of = name_parts(tensor.name)
        if kind in edges:
            held, key = edges[kind], of
        elif kind in nodes and "." in of:
            node_type, _, key = of.rpartition(".")
            held = nodes[kind].setdefault(node_type, {})
        else:
            raise InvalidInput(
                f"tensor '{tensor.name}': its name is none of add_nodes.TYPE.FEATURE,"
                " set_nodes.TYPE.FEATURE, set_nodes.TYPE.ids, remove_edges.TYPE and add_edges.TYPE"
            )
        if key in held:
            raise InvalidInput(f"tensor '{tensor.name}' is given twice")
        if kind in edges:
            held[key] = _array(tensor.name, tensor, *_TENSORS["add_edges"])
        elif kind == "set_nodes" and key == IDS:
            held[key] = _array(tensor.name, tensor, *_TENSORS["set_ids"])
        else:
            held[key] = _array(tensor.name, tensor, (tensor.datatype,), (-1,) * len(tensor.shape))
    return TypedChange(
        add_nodes=nodes["add_nodes"],
        set_nodes=nodes["set_nodes"],
        remove_edges=edges["remove_edges"],
        add_edges=edges["add_edges"],
    )


def _array(
    name: str, tensor: pb.Tensor, datatypes: tuple[str, ...], required: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    if not required:
        raise InvalidInput(f"tensor '{name}': shape [], but at least one dimension is required")
    if tensor.datatype not in datatypes or tensor.datatype not in DTYPES:
        raise InvalidInput(
            f"tensor '{name}': datatype {tensor.datatype or 'missing'}, but "
            f"{' or '.join(DTYPES if datatypes == (tensor.datatype,) else datatypes)} is required"
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
    if kind.name == "BOOL" and any(byte > 1 for byte in tensor.data):
        raise InvalidInput(f"tensor '{name}': a BOOL is 0 or 1")
    array = np.frombuffer(tensor.data, kind.dtype).reshape(shape)
    return array.astype(DATATYPES[datatypes[0]].dtype, copy=False)
