"""Sorted graphs of one run, shared by all layers that use them."""

from collections.abc import Callable
from typing import TypeVar, cast

from torch import Tensor

from serve.lane.executors.kernels import Csr, normalised, spread

_Made = TypeVar("_Made")


class Graphs:
    """Cache of CSRs and edge weights of this run, by the tensors they were made from.

    It holds only tensors with a version counter, so that a tensor changed in place is sorted again.
    A request's tensors have one; those that a model makes in inference mode do not.
    """

    def __init__(self, variant: int = 0) -> None:
        """Have graphs gone over as that place in ``kernels.VARIANTS`` says."""
        self.variant = variant
        self._made: dict[object, tuple[tuple[object, ...], object]] = {}
        #: Edges, weights, and their CSR and weights by slot, of the layer that runs now.
        self._recent: tuple[Tensor, Tensor | None, Csr, Tensor | None] | None = None

    def clear(self) -> None:
        """Forget everything, at the end of a run."""
        self._made.clear()
        self._recent = None

    def of_layer(
        self, edge_index: Tensor, edge_weight: Tensor | None, rows: int
    ) -> tuple[Csr, Tensor | None]:
        """Return the CSR and weights by slot for a layer that never changes its own edges.

        Until `leave_layer` they are cached even for tensors without a version counter.
        """
        recent = self._recent
        if recent is None or recent[0] is not edge_index or recent[2].rows != rows:
            graph = self.csr(edge_index, rows, edges=edge_weight is not None)
        elif edge_weight is not None and not recent[2].edges:
            graph = self.csr(edge_index, rows, edges=True)
        else:
            graph = recent[2]
            if recent[1] is edge_weight:
                return graph, recent[3]
        by_slot = self.weights(graph, edge_weight, normalise=False)
        self._recent = edge_index, edge_weight, graph, by_slot
        return graph, by_slot

    def leave_layer(self) -> None:
        """Drop the cache of `of_layer`."""
        self._recent = None

    def csr(
        self, edge_index: Tensor, rows: int, *, replace_loops: bool = False, edges: bool = False
    ) -> Csr:
        """Return the sorted graph; see ``Csr``."""
        if edge_index.is_inference():
            return self._sorted(edge_index, rows, replace_loops, edges)
        key = id(edge_index), edge_index._version, replace_loops, edges
        found = self._made.get(key)
        # `rows` is not in the key: under export a size is a symbol, which has no hash.
        if found is None or found[1].rows != rows:  # type: ignore[attr-defined]
            made = self._sorted(edge_index, rows, replace_loops, edges)
            # Holding the tensor keeps its id unique.
            found = self._made[key] = (edge_index,), made
        graph = found[1]
        assert isinstance(graph, Csr)
        return graph

    def _sorted(self, edge_index: Tensor, rows: int, replace_loops: bool, edges: bool) -> Csr:
        return Csr(edge_index, rows, replace_loops=replace_loops, edges=edges, variant=self.variant)

    def derived(
        self, name: object, sources: tuple[Tensor | None, ...], rows: int, make: Callable[[], _Made]
    ) -> _Made:
        """Return what `make` makes of `sources`, once a run where all have a version counter.

        It is of a graph of so many rows. `name` tells apart what is made of the same tensors.
        """
        if any(one is not None and one.is_inference() for one in sources):
            return make()
        versions = (None if one is None else (id(one), one._version) for one in sources)
        key = name, *versions
        found = self._made.get(key)
        # As in `csr`, `rows` is not in the key.
        if found is None or cast("tuple[int, _Made]", found[1])[0] != rows:
            found = self._made[key] = sources, (rows, make())
        return cast("tuple[int, _Made]", found[1])[1]

    def weights(
        self, graph: Csr, edge_weight: Tensor | None, *, normalise: bool, missing: float = 1.0
    ) -> Tensor | None:
        """`edge_weight` [E] by slot of `graph`; with `normalise` as a graph convolution's.

        None means ones; `missing` is the weight of an added loop that replaces none.
        """
        if edge_weight is None and not normalise:
            return None
        if edge_weight is not None and edge_weight.is_inference():
            return self._weights(graph, edge_weight, normalise, missing)
        version = None if edge_weight is None else edge_weight._version
        key = id(graph), id(edge_weight), version, normalise, missing
        found = self._made.get(key)
        if found is None:
            made = self._weights(graph, edge_weight, normalise, missing)
            found = self._made[key] = (graph, edge_weight), made
        weight = found[1]
        assert isinstance(weight, Tensor)
        return weight

    def _weights(
        self, graph: Csr, edge_weight: Tensor | None, normalise: bool, missing: float
    ) -> Tensor:
        by_slot = None if edge_weight is None else spread(graph, edge_weight, missing)
        if normalise:
            return normalised(graph, by_slot)
        assert by_slot is not None
        return by_slot
