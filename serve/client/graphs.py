"""Changes to resident graphs as messages; shared by both clients."""

from typing import Any, TypedDict

from serve.client.errors import InvalidRequest
from serve.client.requests import as_array
from serve.pb import gnnserve_pb2
from serve.wire.messages import array_bytes, datatype_of


class GraphChange(TypedDict, total=False):
    """What `update_graph` takes by keyword: arrays, tensors or nested sequences.

    Done in this order, all of it or nothing.
    """

    #: [M, F]: features of M nodes to add, which get the next ids.
    add_x: Any
    #: [K], each node once, and [K, F]: their new features.
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
    """The message; raises InvalidRequest for a name or an array that cannot be."""
    message = gnnserve_pb2.UpdateGraphRequest(graph=graph, if_version=if_version or 0)
    for name, value in change.items():
        if name not in _DTYPES:
            raise InvalidRequest(
                "INVALID_ARGUMENT", f"'{name}' cannot be changed; known: {', '.join(_DTYPES)}"
            )
        array = as_array(name, value, _DTYPES[name])
        tensor = getattr(message, name)
        tensor.datatype = datatype_of(array)
        tensor.shape.extend(array.shape)
        tensor.data = bytes(array_bytes(array))
    return message
