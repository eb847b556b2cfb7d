"""Messages that change resident graphs; shared by both clients."""

from typing import Any, TypedDict

from serve.client.errors import InvalidRequest
from serve.client.requests import as_array
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


_DTYPES: dict[str, str | None] = {
    "add_x": "<f4",
    "set_ids": "<i8",
    "set_x": "<f4",
    "remove_edges": None,
    "add_edges": None,
}


def change_request(
    graph: str, change: GraphChange, if_version: int | None
) -> gnnserve_pb2.UpdateGraphRequest:
    """Return the message; raises InvalidRequest for an unknown name or an unusable array."""
    message = gnnserve_pb2.UpdateGraphRequest(graph=graph, if_version=if_version or 0)
    for name, value in change.items():
        if name not in _DTYPES:
            raise InvalidRequest.local(f"'{name}' cannot be changed; known: {', '.join(_DTYPES)}")
        array = as_array(name, value, _DTYPES[name])
        tensor = getattr(message, name)
        tensor.datatype = datatype_of(array)
        tensor.shape.extend(array.shape)
        tensor.data = bytes(array_bytes(array))
    return message
