"""PyG objects as the arrays that a model takes.

Neither torch nor PyG is imported: an object is told by its class's name and its attributes. What
cannot be sent is refused in PyG's terms.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from serve.client.arrays import array_for
from serve.client.errors import InvalidRequest
from serve.client.facts import ModelInterface, TensorFacts
from serve.inputs import INPUTS
from serve.wire.messages import Array

#: Tensor that asks for nodes of a graph that the server holds.
NODE_IDS = "node_ids"
#: Between an input's name and the node or edge type that it is of, and within an edge type.
_OF, _TO = ".", "__"
#: Datatype of each array that a request may be given by keyword, in the order sent.
DATATYPES_BY_KEYWORD = {
    **{name: each.datatype for name, each in INPUTS.items()},
    NODE_IDS: "INT64",
}
#: Attributes that PyG's Batch needs to shift indices, beside those that are sent.
_NEEDED = frozenset({"num_nodes"})
#: What to do with objects that are no graph of PyG: by class name or by the package's name.
_INSTEAD = {
    "networkx": "convert it with torch_geometric.utils.from_networkx",
    "dgl": "convert it with torch_geometric.utils.from_dgl",
    "str": "load the graph first",
    "PosixPath": "load the graph first",
    "TemporalData": "it holds events; send the Data of one moment",
}


@dataclass(frozen=True, slots=True)
class Graph:
    """The arrays of one request."""

    tensors: dict[str, Array]
    #: Nodes of each graph when there are several; None for one graph.
    graph_nodes: tuple[int, ...] | None = None
    #: Rows of each of them in the outputs that the model declares by their things.
    graph_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def datatype_by_keyword(name: str) -> str:
    """Return the datatype of an array given by keyword; of `node_ids.paper`, that of ids."""
    return DATATYPES_BY_KEYWORD[name.partition(_OF)[0]]


def read_graph(data: Any, given: Mapping[str, Any], interface: ModelInterface) -> Graph:
    """Return the arrays of `data` that the model takes, and those `given` by keyword.

    What is given by keyword goes first. Raises InvalidRequest.
    """
    model = _Model(interface)
    graph_nodes = None
    found: dict[str, Any] = {}
    if data is not None:
        if isinstance(data, list | tuple):
            data = model.batch(data)
        graph_nodes = _graph_nodes(data)
        found = model.values(data, given)
    tensors = {}
    for name, value in {**found, **given}.items():
        if (spec := model.inputs.get(name)) is None:
            # By keyword, and no input of the model: the server says what it takes instead.
            datatype = datatype_by_keyword(name)
        else:
            datatype = spec.datatype
        array = array_for(name, value, datatype, narrow=name in model.narrowed)
        tensors[name] = _checked(name, array)
    if graph_nodes is None:
        return Graph(tensors)
    return Graph(tensors, graph_nodes, _graph_rows(data, interface, len(graph_nodes)))


class _Model:
    """Inputs of one model, and how an object supplies them."""

    def __init__(self, interface: ModelInterface) -> None:
        self._name = interface.name
        #: Those of a graph: `node_ids` stands for all of them, and is given by keyword.
        self.inputs: dict[str, TensorFacts] = {
            each.name: each for each in interface.inputs if each.name.partition(_OF)[0] != NODE_IDS
        }
        self._optional = interface.optional
        self.narrowed = interface.narrowed
        self._typed = sorted({name.partition(_OF)[2] for name in self.inputs if _OF in name})

    def values(self, data: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that `data` has by name; raises InvalidRequest when one is missing."""
        if isinstance(data, Mapping) and not _is_pyg(data):
            return self._of_mapping(data)
        if hasattr(data, "edge_types") and hasattr(data, "node_types"):
            return self._of_hetero(data)
        self._require_graph(data)
        if self._typed:
            self._refuse(
                f"has inputs of the types {', '.join(self._typed)}, so it takes a HeteroData,"
                f" not a {_kind(data)}"
            )
        found = {name: getattr(data, name, None) for name in self.inputs}
        for name, value in found.items():
            if value is None and name not in given and name not in self._optional:
                self._refuse(self._missing(name, data))
        return {name: value for name, value in found.items() if value is not None}

    def batch(self, graphs: Sequence[Any]) -> Any:
        """Return PyG's Batch of `graphs` with the attributes that the model takes."""
        if not graphs:
            self._refuse("is asked with an empty list; a list holds at least one graph")
        kinds = {type(each) for each in graphs}
        for position, each in enumerate(graphs):
            if not hasattr(each, "__cat_dim__"):
                self._refuse(
                    f"is asked with a list, which must hold PyG graphs; its item {position} is a"
                    f" {_kind(each)}"
                )
            if hasattr(each, "ptr"):
                self._refuse(f"is asked with a list whose item {position} is a Batch already")
        if len(kinds) > 1:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            self._refuse(f"is asked with a list of several kinds of graphs: {names}")
        taken = {name.partition(_OF)[0] for name in self.inputs} | _NEEDED
        present = {key for each in graphs for key in _keys(each)}
        for name in sorted(taken & present - _NEEDED):
            lacking = [at for at, each in enumerate(graphs) if name not in _keys(each)]
            if lacking:
                self._refuse(
                    f"is asked with a list in which some graphs have '{name}' and item"
                    f" {lacking[0]} has none"
                )
        # It is imported already: the caller's graphs are of its classes.
        batch = sys.modules["torch_geometric.data"].Batch
        try:
            return batch.from_data_list(list(graphs), exclude_keys=sorted(present - taken))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest.local(f"the list cannot be made a Batch: {error}") from error

    def _of_mapping(self, data: Mapping[Any, Any]) -> dict[str, Any]:
        for name in data:
            if name not in self.inputs:
                self._refuse(f"has no input '{name}'; it takes {', '.join(self.inputs)}")
        return {name: value for name, value in data.items() if value is not None}

    def _of_hetero(self, data: Any) -> dict[str, Any]:
        types = [*map(str, data.node_types), *map(_TO.join, data.edge_types)]
        if not self._typed:
            self._refuse(
                f"takes {', '.join(self.inputs)} of one type; this HeteroData has the types"
                f" {', '.join(types)}: send data.to_homogeneous(), if the model was trained on it"
            )
        found = {}
        for name in self.inputs:
            attribute, _, of = name.partition(_OF)
            if name in self._optional and of not in types:
                continue
            if of and of not in types:
                self._refuse(f"takes '{name}'; this HeteroData has the types {', '.join(types)}")
            key: Any = tuple(of.split(_TO)) if _TO in of else of
            value = data[key].get(attribute) if of else _of_one_type(data, attribute)
            if value is None and name in self._optional:
                continue
            if value is None:
                where = f"data[{key!r}]" if of else "data"
                self._refuse(f"takes '{name}'; {where} has no '{attribute}'")
            found[name] = value
        return found

    def _require_graph(self, data: Any) -> None:
        """Raise InvalidRequest for what is no graph at all."""
        kind = type(data)
        package = kind.__module__.partition(".")[0]
        advice = _INSTEAD.get(kind.__name__) or _INSTEAD.get(package)
        if advice is None and hasattr(data, "__array__"):
            advice = "give arrays by keyword: x=…, edge_index=…"
        if advice is None and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            advice = None if _is_pyg(data) else "give one of its graphs"
        elif advice is None and hasattr(data, "__iter__") and not _is_pyg(data):
            advice = "give one of its graphs"
        if advice is not None:
            self._refuse(f"takes a graph, not a {_kind(data)}: {advice}")

    def _missing(self, name: str, data: Any) -> str:
        has = ", ".join(_keys(data)) or "nothing"
        told = f"takes '{name}', and this {_kind(data)} has none (it has {has})"
        if name == "edge_index" and getattr(data, "adj_t", None) is not None:
            return f"{told}: send the Data from before T.ToSparseTensor"
        if name == "edge_index" and getattr(data, "pos", None) is not None:
            return f"{told}: make edges with T.KNNGraph or T.RadiusGraph"
        if name == "x" and getattr(data, "edge_index", None) is not None:
            return f"{told}: make features, for example with T.Constant or T.OneHotDegree"
        return told

    def _refuse(self, text: str) -> NoReturn:
        raise InvalidRequest.local(f"model '{self._name}' {text}")


def _checked(name: str, array: Array) -> Array:
    """Return `array`; raises InvalidRequest for edges the wrong way round."""
    is_edges = name.partition(_OF)[0] == "edge_index"
    if is_edges and array.ndim == 2 and array.shape[0] != 2 and array.shape[1] == 2:
        raise InvalidRequest.local(
            f"tensor '{name}': shape {list(array.shape)}; PyG's is [2, E]: send edge_index.t()"
        )
    return array


def _of_one_type(data: Any, attribute: str) -> Any:
    """Return an attribute of a HeteroData: its own, or else that of the only type that has it."""
    found = getattr(data, attribute, None)
    if found is None:
        every = [each for store in data.stores if (each := store.get(attribute)) is not None]
        found = every[0] if len(every) == 1 else None
    return found


def _graph_nodes(data: Any) -> tuple[int, ...] | None:
    """Return the nodes of each graph of a PyG Batch; None for anything else."""
    ptr = None if isinstance(data, Mapping) else getattr(data, "ptr", None)
    if ptr is None or not hasattr(ptr, "tolist"):
        return None
    return tuple(np.diff(ptr.tolist()).tolist())


def _graph_rows(data: Any, interface: ModelInterface, graphs: int) -> dict[str, tuple[int, ...]]:
    """Return how many rows each graph of a Batch has in each declared output, as far as it tells.

    PyG keeps where each graph's part of an attribute begins. A declaration's symbols say what the
    parts count: nodes, edges, or whatever else; and a symbol that is in no shape counts graphs.
    """
    begins: Any = getattr(data, "_slice_dict", None) or {}
    shapes = {slot["name"]: slot.get("shape", ()) for slot in interface.declared_inputs}
    counts: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        symbols = [dim for dim in shape if isinstance(dim, str)]
        begin = begins.get(name)
        if len(symbols) == 1 and hasattr(begin, "tolist"):
            counts.setdefault(symbols[0], tuple(np.diff(begin.tolist()).tolist()))
    bound = {dim for shape in shapes.values() for dim in shape}
    for slot in interface.declared_inputs:
        for symbol in set(slot.get("index", ())) - bound:
            counts[symbol] = (1,) * graphs
    outputs = ((slot["name"], slot.get("shape", ())) for slot in interface.declared_outputs)
    rows = {name: counts.get(shape[0], ()) for name, shape in outputs if shape}
    return {name: found for name, found in rows.items() if len(found) == graphs}


def _keys(data: Any) -> list[str]:
    """Return the names of an object's attributes with a value."""
    keys = data.keys() if callable(getattr(data, "keys", None)) else getattr(data, "__dict__", ())
    return sorted(str(key) for key in keys if getattr(data, str(key), None) is not None)


def _is_pyg(data: Any) -> bool:
    return hasattr(data, "__cat_dim__")


def _kind(value: Any) -> str:
    return type(value).__name__
