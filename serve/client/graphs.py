"""Messages that change resident graphs; shared by both clients."""

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from serve.client.arrays import any_array, array_for
from serve.client.errors import InvalidRequest
from serve.client.requests import type_text
from serve.pb import gnnserve_pb2
from serve.wire.messages import Array, array_bytes, datatype_of


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
    #: For a graph with several types; edges are then given by type too: a mapping from
    #: `author__writes__paper`, or PyG's tuple, to [2, E]. All features of new nodes, by node type
    #: and name: `{"paper": {"x": …}}`.
    add_nodes: Mapping[str, Mapping[str, Any]]
    #: `ids` of nodes, each once, and some of their features: `{"paper": {"ids": …, "x": …}}`.
    set_nodes: Mapping[str, Mapping[str, Any]]


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
        if isinstance(value, Mapping):
            for of, array in _by_type(name, value):
                _fill(message.tensors.add(name=of), array)
            continue
        if name not in _DATATYPES:
            known = ", ".join(_DATATYPES)
            raise InvalidRequest.local(f"'{name}' cannot be changed; known: {known}")
        datatype, narrow = _DATATYPES[name]
        array = array_for(name, value, datatype, narrow=narrow)
        _fill(getattr(message, name), array)
    return message


def _by_type(name: str, value: Mapping[Any, Any]) -> Iterator[tuple[str, Array]]:
    """Yield names and arrays of a change by type; raises InvalidRequest."""
    for of, held in value.items():
        where = f"{name}.{type_text(of)}"
        if name in ("add_edges", "remove_edges"):
            yield where, array_for(where, held, "INT64", narrow=True)
        elif name in ("add_nodes", "set_nodes") and isinstance(held, Mapping):
            yield from ((f"{where}.{key}", any_array(f"{where}.{key}", held[key])) for key in held)
        else:
            raise InvalidRequest.local(f"'{where}' cannot be changed by type")


def _fill(tensor: gnnserve_pb2.Tensor, array: Array) -> None:
    tensor.datatype = datatype_of(array)
    tensor.shape.extend(array.shape)
    tensor.data = bytes(array_bytes(array))
