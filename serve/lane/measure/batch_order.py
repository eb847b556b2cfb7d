"""Find out whether a model needs the nodes of one graph side by side, as PyG's Batch has them.

Layers that make one dense block of each graph do, such as GPSConv: they count positions from where
a graph begins. With nodes in another order they raise, or mix graphs without a word.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from serve.inputs import INPUTS
from serve.interface import InputSlot, Interface, TensorSlot
from serve.lane.measure.closeness import is_close
from serve.models.model_signature import Rows

_Run = Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]


def short_interface(names: Sequence[str], rows: Rows) -> Interface:
    """Return what a model of the short form would declare."""
    inputs = (INPUTS[name] for name in dict.fromkeys(names))
    return Interface(
        tuple(
            InputSlot(
                each.name,
                each.datatype,
                each.shape,
                index=() if each.ids_below is None else (each.ids_below,),
            )
            for each in inputs
        ),
        (TensorSlot("output", "FP32", ("N" if rows == "node" else "G", "C")),),
    )


def needs_sorted_batch(
    run: _Run, interface: Interface, graph: Mapping[str, Tensor], *, deterministic: bool
) -> bool:
    """Return True when the model's answer changes, or ends, with the order of nodes in `batch`.

    `graph` is several sorted graphs. Of a model that is not `deterministic` only errors tell.
    """
    orders = {slot.symbols[0]: _dealt(graph[slot.name]) for slot in interface.orders}
    if not orders:
        return False
    try:
        expected = run(graph)
    except Exception:
        return False
    try:
        found = run(_reordered(interface, graph, orders))
    except Exception:
        return True
    return deterministic and not all(
        one.shape == other.shape and is_close(one, _moved(slot, other, orders))
        for slot, one, other in zip(interface.outputs, found, expected, strict=True)
    )


def _dealt(batch: Tensor) -> Tensor:
    """Return an order of nodes that has one of each graph in turn, and keeps that in each graph."""
    sizes = torch.bincount(batch)
    places = torch.arange(len(batch)) - (sizes.cumsum(0) - sizes)[batch]
    return places.argsort(stable=True)


def _reordered(
    interface: Interface, graph: Mapping[str, Tensor], orders: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the same graph with its nodes in other orders, by symbol."""
    now_at = {symbol: order.argsort() for symbol, order in orders.items()}
    found = {}
    for slot in interface.inputs:
        value = _moved(slot, graph[slot.name], orders)
        if set(slot.index) & orders.keys():
            parts = value if len(slot.row_bounds) > 1 else (value,)
            value = torch.stack([
                now_at[symbol][part] if symbol in orders else part
                for symbol, part in zip(slot.row_bounds, parts, strict=True)
            ]).view_as(value)  # fmt: skip
        found[slot.name] = value
    return found


def _moved(slot: TensorSlot, value: Tensor, orders: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor with its nodes in another order, if it has any of these."""
    for axis, symbol in enumerate(slot.shape):
        if isinstance(symbol, str) and symbol in orders:
            value = value.index_select(axis, orders[symbol])
    return value
