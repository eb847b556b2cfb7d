"""Messages that change resident graphs; shared by both clients."""

from typing import Any, TypedDict

from serve.client.arrays import array_for
from serve.client.errors import InvalidRequest
from serve.pb import gnnserve_pb2
from serve.wire.messages import array_bytes, datatype_of


class GraphChange(TypedDict, total=False):
    """Keyword arguments of `update_graph`: arrays, tensors or nested sequences.

    The server applies them in this order, all or none.
    """

    #: [M, F]: features of M new nodes, which get the next ids.
    add_x: Any
    #: [K] node ids, each once, and [K, F]: their new features.
    set_ids: Any
    set_x: Any
    #: [2, E], sources first. Parallel edges are removed together.
    remove_edges: Any
    add_edges: Any


#: Datatype, and whether integers that fit are sent as INT32.
_DATATYPES = {
    "add_x": ("FP32", False),
    "set_ids": ("INT64", False),
    "set_x": ("FP32", False),
    "remove_edges": ("INT64", True),
    "add_edges": ("INT64", True),
}


def change_request(
    graph: str, change: GraphChange, if_version: int | None
) -> gnnserve_pb2.UpdateGraphRequest:
    """Return the message; raises InvalidRequest for an unknown name or an unusable array."""
    message = gnnserve_pb2.UpdateGraphRequest(graph=graph, if_version=if_version or 0)
    for name, value in change.items():
        if name not in _DATATYPES:
            known = ", ".join(_DATATYPES)
            raise InvalidRequest.local(f"'{name}' cannot be changed; known: {known}")
        datatype, narrow = _DATATYPES[name]
        array = array_for(name, value, datatype, narrow=narrow)
        tensor = getattr(message, name)
        tensor.datatype = datatype_of(array)
        tensor.shape.extend(array.shape)
        tensor.data = bytes(array_bytes(array))
    return message
