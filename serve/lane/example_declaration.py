"""Declares the inputs and outputs of a model by an example: a graph as it was trained on.

Names are those of forward's parameters, looked up in the example. PyG's own rules say what an
attribute counts: nodes, edges, or other things where its name tells that it points to nodes.
Integers that are no index have the range of the embedding that reads them, or else the example's.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from serve.errors import ConfigError, ServeError
from serve.interface import DTYPES, InputSlot, Interface, is_float
from serve.lane.example_outputs import outputs_of, typed_key
from serve.lane.graph_importing import read_graph
from serve.lane.models.advice import advice, explained
from serve.lane.models.calling import called, method_of, required_parameters, takes_data
from serve.lane.models.declared import DeclaredForward
from serve.models.declaration import MOST_TENSORS, declaration_text
from serve.models.repository import ModelSpec
from serve.models.wrappers import wrapper

_WIRES = {name: wire for wire, name in DTYPES.items()}
#: Attributes of a training graph that no forward(data) is asked with.
_NOT_ASKED = ("y", "ptr", "edge_label", "train_mask", "val_mask", "test_mask", "num_nodes")


def declare(module: nn.Module, spec: ModelSpec, source: Path) -> tuple[str, tuple[str, ...]]:
    """Return `[[model.input]]` and `[[model.output]]` for the example in the file `source`.

    Also returns notes on what the example alone could not tell. Raises ConfigError when the example
    does not fit, and ModelError when the model has no such method.
    """
    graph = read_graph(source)
    method = method_of(module, spec)
    module.eval()
    slots = tuple(_slots(graph, method, spec))
    if len(slots) > MOST_TENSORS:
        raise ConfigError(
            f"--example: the model takes {len(slots)} of its tensors; a request holds at most"
            f" {MOST_TENSORS}"
        )
    spec = msgspec.structs.replace(spec, inputs=tuple(slot.name for slot in slots))
    runs = called(module, spec)
    notes: list[str] = []
    try:
        slots = tuple(_with_ranges(runs, slots, _values(graph, slots), notes))
        outputs = outputs_of(runs, slots)
    except ServeError as error:
        raise ConfigError(f"--example: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"--example: with {', '.join(spec.inputs)} of {source} the model does not run:"
            f" {type(error).__name__}: {str(error).partition(chr(10))[0]};"
            f" {advice(error) or 'declare its inputs in a file: --declaration FILE'}"
        ) from error
    return declaration_text(slots, outputs), tuple(notes)


# -- inputs ---------------------------------------------------------------------------------------


def _slots(
    graph: Data | HeteroData, method: Callable[..., Any], spec: ModelSpec
) -> Iterator[InputSlot]:
    """Yield an input for each parameter that the example has; raises ConfigError."""
    if told := wrapper(spec.factory, spec.method, required_parameters(method)):
        raise ConfigError(f"--example: {told}")
    given = [key for key in _keys(graph) if key not in _NOT_ASKED]
    if as_graph := takes_data(method, given):
        names = _read_by(method, graph, spec) if isinstance(graph, Data) else given
        wanted = dict.fromkeys(names, False)
    else:
        parameters = inspect.signature(method).parameters.values()
        positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        wanted = {
            one.name: one.default is not one.empty
            for one in parameters
            if one.kind in positional and one.name not in spec.method_args
        }
    graphs = _graphs(graph) if "batch" in wanted else 0
    for name, optional in wanted.items():
        found = list(_named(graph, name, as_graph, graphs))
        if not found and name == "batch":
            found = [InputSlot("batch", "INT64", ("N",), index=("G",), optional=True, default=0)]
        if not found and not optional:
            raise ConfigError(f"--example: forward takes '{name}', and {_lack(graph, name)}")
        yield from (_optional(slot) if optional else slot for slot in found)


class _Watched(Data):  # type: ignore[misc]
    """A graph that notes which of its attributes are read."""

    def __getattr__(self, key: str) -> Any:
        self.__dict__.setdefault("_seen", []).append(key)
        return super().__getattr__(key)

    def __getitem__(self, key: str) -> Any:
        self.__dict__.setdefault("_seen", []).append(key)
        return super().__getitem__(key)


def _read_by(method: Callable[..., Any], graph: Data, spec: ModelSpec) -> list[str]:
    """Return the tensors of the example that `method` reads, and `batch` if it asks for that.

    Raises ConfigError when it does not run.
    """
    watched = _Watched(**{str(key): value for key, value in graph.to_dict().items()})
    if watched.batch is None:
        watched.batch = torch.zeros(watched.num_nodes or 0, dtype=torch.int64)
    watched.__dict__["_seen"] = []
    try:
        with torch.inference_mode():
            method(watched, **spec.method_args)
    except Exception as error:
        raise ConfigError(f"--example: the model does not run on it: {explained(error)}") from error
    seen = dict.fromkeys(watched.__dict__["_seen"])
    return [key for key in seen if key == "batch" or torch.is_tensor(graph.get(key))]


def _optional(slot: InputSlot) -> InputSlot:
    # Without a default: forward has its own.
    return replace(slot, optional=True, default=None)


def _keys(graph: Data | HeteroData) -> list[str]:
    stores = graph.stores if isinstance(graph, HeteroData) else [graph]
    keys = (key for store in stores for key in store.to_dict() if torch.is_tensor(store[key]))
    return list(dict.fromkeys(map(str, keys)))


def _lack(graph: Data | HeteroData, name: str) -> str:
    """Return why the example gives no input for a parameter of forward."""
    value = getattr(graph, name, None)
    if value is None:
        return f"the example has no such attribute; it has {', '.join(_keys(graph)) or 'nothing'}"
    return (
        f"that is no tensor in the example ({type(value).__name__}); requests hold tensors, so"
        " import a class that makes it of the tensors it is given"
    )


def _graphs(graph: Data | HeteroData) -> int:
    """Return the number of graphs in the example, 1 without a `batch`."""
    batch = graph.get("batch") if isinstance(graph, Data) else None
    return int(batch.max()) + 1 if torch.is_tensor(batch) and batch.numel() else 1


def _named(graph: Data | HeteroData, name: str, as_graph: bool, graphs: int) -> Iterator[InputSlot]:
    """Yield the inputs that the example has for a parameter of forward.

    `as_graph`: forward takes the whole graph, and finds each attribute at its type. `graphs`: how
    many it holds, 0 where forward does not tell them apart.
    """
    if isinstance(graph, HeteroData):
        yield from _typed(graph, name, as_graph)
    elif torch.is_tensor(value := getattr(graph, name, None)):
        yield _slot(name, value, _symbol(graph, name, graphs), ("N",) if _points(name) else ())


def _symbol(graph: Data, name: str, graphs: int) -> str:
    """Return the symbol of what an attribute has one of each for; empty for sizes that stay."""
    if name.startswith("edge_label"):
        return "K"
    if name == "edge_index" or graph.is_edge_attr(name):
        return "E"
    if graph.is_node_attr(name):
        return "N"
    if _points(name):
        return f"K.{name}"
    return "G" if graphs and graph[name].dim() and len(graph[name]) == graphs else ""


def _points(name: str) -> bool:
    """Return True for an attribute whose values are nodes, as PyG's Data shifts them in batches."""
    return "index" in name or name == "face"


def _typed(graph: HeteroData, name: str, as_graph: bool) -> Iterator[InputSlot]:
    base = name.removesuffix("_dict")
    stores = [store for store in graph.stores if torch.is_tensor(store.get(base))]
    for store in stores:
        kind = store._key
        told = typed_key(kind)
        plain = len(stores) == 1 and not name.endswith("_dict") and not as_graph
        nodes = (f"N.{kind[0]}", f"N.{kind[2]}") if isinstance(kind, tuple) else ()
        if base.startswith("edge_label"):
            symbol = "K"
        else:
            symbol = f"E.{told}" if isinstance(kind, tuple) else f"N.{told}"
        yield _slot(
            base if plain else f"{base}.{told}",
            store[base],
            symbol,
            nodes if _points(base) else (),
        )


def _slot(name: str, value: Tensor, symbol: str, index: tuple[str, ...]) -> InputSlot:
    """Return the input of an attribute; raises ConfigError for one that no request can hold."""
    datatype = _WIRES.get(str(value.dtype).removeprefix("torch."))
    if datatype is None or value.layout != torch.strided:
        raise ConfigError(f"--example: '{name}' is {value.dtype}, {value.layout}")
    if name.partition(".")[0] == "batch":
        return InputSlot(name, "INT64", (symbol or "N",), index=("G",), optional=True, default=0)
    axis = value.dim() - 1 if index else 0
    shape = tuple(
        symbol if symbol and place == axis else size for place, size in enumerate(value.shape)
    )
    if (not index and is_float(datatype)) or datatype == "BOOL":
        return InputSlot(name, datatype, shape)
    if index:
        return InputSlot(name, datatype, shape, index=index[:1] if len(set(index)) == 1 else index)
    low = min(0, int(value.min())) if value.numel() else 0
    high = int(value.max()) + 1 if value.numel() else 1
    return InputSlot(name, datatype, shape, low=low, high=max(high, low + 1))


def _values(graph: Data | HeteroData, slots: Sequence[InputSlot]) -> dict[str, Tensor]:
    """Return the example's tensor for each input that it has."""
    found: dict[str, Tensor] = {}
    for slot in slots:
        base, _, of = slot.name.partition(".")
        if isinstance(graph, HeteroData):
            stores = (each for each in graph.stores if torch.is_tensor(each.get(base)))
            told = {typed_key(store._key): store[base] for store in stores}
            value = told.get(of) if of else next(iter(told.values()), None)
        else:
            value = getattr(graph, base, None)
        if torch.is_tensor(value):
            found[slot.name] = value.contiguous()
    return found


def _with_ranges(
    module: nn.Module, slots: tuple[InputSlot, ...], values: Mapping[str, Tensor], notes: list[str]
) -> Iterator[InputSlot]:
    """Run the example, and yield the inputs with the ranges of the embeddings that read them."""
    seen: dict[str, dict[int, int]] = {}

    def note(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and torch.is_tensor(ids := arguments[0]) and isinstance(layer, nn.Embedding):
            for name, value in values.items():
                column = _column(value, ids)
                if column is not None:
                    of_input = seen.setdefault(name, {})
                    least = of_input.get(column, layer.num_embeddings)
                    of_input[column] = min(least, layer.num_embeddings)

    forward = DeclaredForward(module, Interface(slots, ()), "the example")
    with ExitStack() as hooks, torch.inference_mode():
        for layer in module.modules():
            if isinstance(layer, nn.Embedding):
                hooks.callback(layer.register_forward_pre_hook(note).remove)
        forward.returned(module, values, forward.sizes(values))
    for slot in slots:
        if slot.index or is_float(slot.datatype) or slot.datatype == "BOOL":
            yield slot
            continue
        ranges = seen.get(slot.name, {})
        width = values[slot.name].shape[-1] if len(slot.shape) > 1 else 0
        whole = ranges.get(-1)
        if whole is not None:
            yield replace(slot, low=min(0, int(slot.low or 0)), high=whole)
        elif width and len(ranges) == width:
            columns = tuple((0, ranges[column]) for column in range(width))
            yield replace(slot, low=0, high=max(ranges.values()), columns=columns)
        else:
            notes.append(
                f"'{slot.name}' has values in [{slot.low}, {slot.high}) in the example, and others"
                " are refused: widen low and high in config.toml if training had more"
            )
            yield slot


def _column(value: Tensor, ids: Tensor) -> int | None:
    """Return the column of `value` that `ids` shows, -1 for all of it, None for something else."""
    if ids.shape == value.shape and torch.equal(ids, value):
        return -1
    if value.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
        return None
    if ids.numel() == value.numel():
        return -1
    if value.dim() == 2 and ids.numel() == value.shape[0]:
        return int(ids.storage_offset() - value.storage_offset()) % int(value.shape[1])
    return None
