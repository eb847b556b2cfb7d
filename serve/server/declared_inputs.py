"""The inputs of a request for a model that declares them, in the shared pool.

Every tensor is copied and then checked where it lies: indices against the numbers of things that
they point to, integers against their declared range, and floats for numbers that are none.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from msgspec.structs import replace

from serve.core.types import Sized, Task
from serve.errors import InvalidInput, InvariantViolation
from serve.interface import InputSlot, Interface, TensorSlot, is_float
from serve.ipc.messages import TensorRef
from serve.ipc.shared_pool import SharedPool
from serve.native import PlainRequest
from serve.server.api import InferCall
from serve.server.catalogue import ModelEntry
from serve.server.graphs_told import copy_tensor, graphs_staged, graphs_told
from serve.server.request_inputs import LaidOutInputs, SentInputs, StagedInputs
from serve.server.staging import Staged, aligned, check_ascending, key_of, plan_layout

_Array = np.ndarray[Any, np.dtype[Any]]


class CountedInputs(SentInputs):
    """The inputs of a request whose size is more than nodes and edges."""

    #: In the order of ``Interface.counts``.
    _counts: tuple[int, ...]
    #: Numbers of nodes and of all other things.
    _totals: tuple[int, int]
    #: Places of the outputs; empty until the number of graphs is known, when staged.
    _outputs: tuple[TensorRef, ...] = ()

    @property
    def output_refs(self) -> tuple[TensorRef, ...]:
        """See ``RequestInputs``."""
        return self._outputs

    def expected(self) -> Sized:
        """See ``RequestInputs``."""
        counts = self._counts + self._of_graphs
        estimate = self.entry.estimator.estimate(*counts, by_kind=self.by_kind)
        return Sized(*self._totals, estimate, counts)

    def exact(self, task: Task) -> Sized:
        """Return the task's size, which its shapes tell, with memory by the things of each kind."""
        counts = self._counts + self._of_graphs
        peak_bytes, reserve_bytes = self.entry.estimator.memory(*counts, by_kind=self.by_kind)
        estimate = replace(task.estimate, peak_bytes=peak_bytes, reserve_bytes=reserve_bytes)
        return Sized(*self._totals, estimate, counts)


class StagedDeclaredInputs(CountedInputs, StagedInputs):
    """The declared inputs of a request that the front has checked and staged."""

    def __init__(
        self, call: InferCall, entry: ModelEntry, pool: SharedPool, request: PlainRequest
    ) -> None:
        """`request` is staged in `pool`; this owns its block from now on."""
        super().__init__(call, entry, pool, request)
        interface = _interface_of(entry)
        self._counts = request.counts
        self._totals = interface.totals(self._counts)
        sizes = dict(zip(interface.counts, self._counts, strict=True))
        interface.graph_counts(request.largest, sizes)
        assert self.staged is not None
        self._outputs = output_refs(interface.outputs, sizes, self.staged)
        self._of_graphs = graphs_staged(request, entry, self._counts)
        if entry.estimator.counts_kinds:
            kinds = {slot.name for slot in interface.kinds}
            self.by_kind = interface.kind_counts({
                ref.name: pool.array(ref.offset_bytes, ref.dtype, ref.shape)
                for ref in self.staged.inputs
                if ref.name in kinds
            })  # fmt: skip


class DeclaredInputs(CountedInputs, LaidOutInputs):
    """The inputs of a request that brings the tensors that its model declares."""

    def __init__(
        self, call: InferCall, entry: ModelEntry, pool: SharedPool, *, check_finite: bool
    ) -> None:
        """Size the request and plan its layout.

        Raises InvalidInput for shapes that disagree, and for a request without nodes or other
        things that the model cannot take.
        """
        super().__init__(call, entry, pool)
        self._interface = interface = _interface_of(entry)
        self._check_finite = check_finite
        shapes = {name: tensor.shape for name, tensor in call.tensors.items()}
        self._counts = _checked_counts(call, entry, interface, shapes)
        self._totals = interface.totals(self._counts)
        self._of_graphs = graphs_told(call, entry, self._counts)
        self._layout = plan_layout(
            shapes,
            entry.spec.inputs,
            output_bytes(interface.outputs, interface.sizes(self._counts)),
            dtypes={slot.name: slot.dtype for slot in interface.inputs},
        )

    def stage(self) -> bool:
        """See ``RequestInputs``."""
        block = self._take_block(self._layout)
        staged = self._layout.at(block)
        sizes = dict(zip(self._interface.counts, self._counts, strict=True))
        try:
            arrays = {
                ref.name: self._staged(self._interface.by_name[ref.name], ref)
                for ref in staged.inputs
            }
        except BaseException:
            self._drop_block(block)
            raise
        self._interface.graph_counts(self._interface.largest(arrays), sizes)
        self._outputs = output_refs(self._interface.outputs, sizes, staged)
        self.staged = replace(staged, is_shared=self.joint is not None)
        if self.by_kind is not None or not self.entry.estimator.counts_kinds:
            return False
        self.by_kind = self._interface.kind_counts(arrays)
        return self.by_kind is not None

    def _staged(self, slot: InputSlot, ref: TensorRef) -> _Array:
        """Copy one tensor to its place and check it there; returns it."""
        target = self._pool.array(ref.offset_bytes, ref.dtype, ref.shape)
        if self.joint is None or key_of(ref) not in self.joint.staged:
            copy_tensor(self.call.tensors[slot.name], target)
        if slot.index:
            _check_index(slot, target, self._bounds(slot))
            if self.entry.signature.needs_sorted_batch and slot in self._interface.orders:
                check_ascending(slot.name, target)
        elif slot.datatype == "BOOL":
            raw = self._pool.array(ref.offset_bytes, "uint8", ref.shape)
            _check_range(slot.name, raw, 0, 2, "a BOOL is 0 or 1")
        elif not is_float(slot.datatype):
            low, high = (int(bound) for bound in slot.bounds)
            _check_range(slot.name, target, low, high, f"it must be in [{low}, {high})")
            _check_columns(slot, target)
        elif self._check_finite:
            _check_finite(slot.name, target)
        return target

    def _bounds(self, slot: InputSlot) -> list[tuple[str, int]]:
        """Return symbol and number of the things that each row points to."""
        # No more graphs than things of any kind: a graph of none has no part in the answer.
        most = self._interface.sizes(self._counts)
        return [(symbol, most[symbol]) for symbol in slot.row_bounds]


def _interface_of(entry: ModelEntry) -> Interface:
    if entry.spec.interface is None:
        raise InvariantViolation(f"model {entry.spec.key} declares no inputs")
    return entry.spec.interface


def _checked_counts(
    call: InferCall,
    entry: ModelEntry,
    interface: Interface,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[int, ...]:
    """Return the request's counts; raises InvalidInput for those that the model cannot take."""
    counts = interface.counts_of(shapes)
    num_nodes, num_others = interface.totals(counts)
    nodes = len(interface.nodes)
    if num_nodes == 0 and not entry.signature.accepts_empty:
        raise InvalidInput(
            f"the request has 0 {' and '.join(interface.counts[:nodes])}, which model"
            f" '{call.model}' cannot take"
        )
    if num_others == 0 and len(counts) > nodes and not entry.signature.accepts_edgeless:
        raise InvalidInput(
            f"the request has 0 {' and '.join(interface.counts[nodes:])}, which model"
            f" '{call.model}' cannot take"
        )
    return counts


def output_bytes(slots: tuple[TensorSlot, ...], sizes: Mapping[str, int]) -> int:
    """Return the bytes of all outputs in the pool."""
    return sum(aligned(slot.element_bytes * prod(slot.shape_for(sizes))) for slot in slots)


def output_refs(
    slots: tuple[TensorSlot, ...], sizes: Mapping[str, int], staged: Staged
) -> tuple[TensorRef, ...]:
    """Return the place of each output, one after the other in the place of all."""
    refs = []
    offset_bytes = staged.output_offset_bytes
    for slot in slots:
        ref = TensorRef(slot.name, slot.dtype, slot.shape_for(sizes), offset_bytes)
        refs.append(ref)
        offset_bytes += aligned(ref.size_bytes)
    return tuple(refs)


def _check_index(slot: InputSlot, values: _Array, bounds: list[tuple[str, int]]) -> None:
    """Raise InvalidInput unless all values point to things that are there."""
    parts: list[tuple[tuple[int, ...], _Array]] = [((), values)]
    if len({bound for _, bound in bounds}) == 1:
        bounds = bounds[:1]
    else:
        parts = [((row,), values[row]) for row in range(len(bounds))]
    for (at, part), (symbol, bound) in zip(parts, bounds, strict=True):
        rule = f"it must be in [0, {bound}), the number of {symbol}"
        _check_range(slot.name, part, 0, bound, rule, at)


def _check_range(
    name: str, values: _Array, low: int, high: int, rule: str, at: tuple[int, ...] = ()
) -> None:
    """Raise InvalidInput for the first value outside [low, high); `at` is the place of `values`."""
    if not values.size or (low <= int(values.min()) and int(values.max()) < high):
        return
    flat = int(np.flatnonzero(((values < low) | (values >= high)).reshape(-1))[0])
    place = (*at, *(int(i) for i in np.unravel_index(flat, values.shape)))
    raise InvalidInput(
        f"input '{name}' [{', '.join(map(str, place))}] is {values.reshape(-1)[flat]}; {rule}"
    )


def _check_columns(slot: InputSlot, values: _Array) -> None:
    """Raise InvalidInput for the first value outside its column's range, where each has one."""
    if not slot.columns:
        return
    lows, highs = np.array(slot.columns, np.int64).T
    wrong = (values < lows) | (values >= highs)
    if wrong.any():
        place = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), values.shape))
        low, high = slot.columns[place[-1]]
        raise InvalidInput(
            f"input '{slot.name}' [{', '.join(map(str, place))}] is {values[place]}; in this column"
            f" it must be in [{low}, {high})"
        )


def _check_finite(name: str, values: _Array) -> None:
    """Raise InvalidInput for the first value that is no finite number."""
    finite = np.isfinite(values)
    count = int(values.size - np.count_nonzero(finite))
    if count:
        flat = int(np.flatnonzero(~finite.reshape(-1))[0])
        place = ", ".join(str(int(i)) for i in np.unravel_index(flat, values.shape))
        raise InvalidInput(
            f"input '{name}' [{place}] is {values.reshape(-1)[flat]}; features must be finite"
            f" ({count} of {values.size} are not)"
        )
