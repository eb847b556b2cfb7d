"""The operations of ``serve._core`` in numpy, as an oracle for its tests.

Written to be plainly right, not fast.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from serve.native import BytesLike


def stage_indices(
    src: BytesLike, is_int32: bool, bound: int, dst: BytesLike, narrow: bool = False
) -> int:
    """See ``serve.native.stage_indices``."""
    if bound < 0:
        raise ValueError("bound must be at least 0")
    if narrow and not is_int32:
        raise ValueError("int64 indices cannot be narrowed")
    source = _flat(src, "i4" if is_int32 else "i8")
    target = _flat(dst, "i4" if narrow else "i8")
    _require_sizes(source.size == target.size, "stage_indices", source, target)
    target[:] = source
    return _first((target < 0) | (target >= bound))


def stage_features(src: BytesLike, dst: BytesLike, check_finite: bool) -> int:
    """See ``serve.native.stage_features``."""
    source, target = _flat(src, "f4"), _flat(dst, "f4")
    _require_sizes(source.size == target.size, "stage_features", source, target)
    # As integers, so that a signalling NaN is copied bit by bit.
    target.view("i4")[:] = source.view("i4")
    return _first(~np.isfinite(target)) if check_finite else -1


def build_rows(
    edges: BytesLike,
    is_int32: bool,
    num_sources: int,
    num_nodes: int,
    indptr: BytesLike,
    indices: BytesLike,
    narrow: bool,
) -> int:
    """See ``serve.native.build_rows``."""
    flat = _flat(edges, "i4" if is_int32 else "i8").astype(np.int64)
    starts, target = _flat(indptr, "i8"), _flat(indices, "i4" if narrow else "i8")
    num_edges = flat.size // 2
    if flat.size % 2 or starts.size != num_nodes + 1 or target.size != num_edges:
        raise ValueError("edges [2, E], indptr [N + 1] and indices [E] do not fit together")
    bad = _first((flat < 0) | (flat >= np.repeat([num_sources, num_nodes], num_edges)))
    if bad < 0:
        order = np.argsort(flat[num_edges:], kind="stable")
        target[:] = flat[:num_edges][order]
        starts[0] = 0
        starts[1:] = np.cumsum(np.bincount(flat[num_edges:], minlength=num_nodes))
    return bad


class Topology:
    """See ``serve.native.Topology``."""

    def __init__(
        self,
        num_nodes: int,
        indptr: BytesLike,
        indices: BytesLike,
        is_int32: bool,
        patched: BytesLike,
        patched_indptr: BytesLike,
        patched_indices: BytesLike,
    ) -> None:
        self.num_nodes = num_nodes
        self._indptr = _flat(indptr, "i8")
        self._indices = _flat(indices, "i4" if is_int32 else "i8")
        self._patched = _flat(patched, "i8")
        self._patched_indptr = _flat(patched_indptr, "i8")
        self._patched_indices = _flat(patched_indices, "i8")
        for starts, held, what in (
            (self._indptr, self._indices, "indptr"),
            (self._patched_indptr, self._patched_indices, "patched_indptr"),
        ):
            if starts.size < 1 or starts[0] != 0 or starts[-1] != held.size:
                raise ValueError(f"{what} does not end with the number of indices")
        if self._indptr.size > num_nodes + 1:
            raise ValueError("indptr has rows beyond num_nodes")
        if self._patched_indptr.size != self._patched.size + 1:
            raise ValueError("patched_indptr does not fit patched and patched_indices")

    def row(self, node: int) -> list[int]:
        """In-neighbours of the node."""
        at = int(np.searchsorted(self._patched, node))
        starts, held = self._indptr, self._indices
        if at < self._patched.size and self._patched[at] == node:
            starts, held = self._patched_indptr, self._patched_indices
        elif node + 1 >= self._indptr.size:
            return []
        else:
            at = node
        found: list[int] = held[starts[at] : starts[at + 1]].tolist()
        return found


class Sample:
    """See ``serve.native.Sample``."""

    def __init__(
        self, nodes: list[int], ends: list[tuple[int, int]], positions: list[int], num_seeds: int
    ) -> None:
        self._nodes, self._ends, self._positions = nodes, ends, positions
        self.num_nodes, self.num_edges, self.num_seeds = len(nodes), len(ends), num_seeds

    def write_nodes(self, target: BytesLike) -> None:
        """Write the node of each local id, int64."""
        _fill(_flat(target, "i8"), self._nodes)

    def write_positions(self, target: BytesLike) -> None:
        """Write the local id of each asked id, int64."""
        _fill(_flat(target, "i8"), self._positions)

    def write_edges(self, target: BytesLike, is_int32: bool) -> None:
        """Write the edges [2, E] in local ids, int32 or int64."""
        values = [source for source, _ in self._ends] + [end for _, end in self._ends]
        _fill(_flat(target, "i4" if is_int32 else "i8"), values)


def sample_neighbours(
    topology: Topology, ids: BytesLike, fanouts: Sequence[int], seed: int
) -> Sample:
    """See ``serve.native.sample_neighbours``."""
    asked = _flat(ids, "i8").tolist()
    for node in asked:
        if not 0 <= node < topology.num_nodes:
            raise ValueError(f"id {node} is not in [0, {topology.num_nodes})")
    for fanout in fanouts:
        if fanout < 1 and fanout != -1:
            raise ValueError(f"fan-out {fanout} is neither positive nor -1")
    locals_: dict[int, int] = {}
    positions = [locals_.setdefault(node, len(locals_)) for node in asked]
    num_seeds = begin = len(locals_)
    frontier = list(locals_)
    ends: list[tuple[int, int]] = []
    for hop, fanout in enumerate(fanouts):
        hop_key = _mix(seed + (hop + 1) * _GOLDEN)
        for local, node in enumerate(frontier, begin - len(frontier)):
            row = topology.row(node)
            if 0 <= fanout < len(row):
                row = [row[at] for at in _draw(_mix(hop_key ^ node), len(row), fanout)]
            ends += [(locals_.setdefault(met, len(locals_)), local) for met in row]
        frontier = list(locals_)[begin:]
        begin = len(locals_)
    return Sample(list(locals_), ends, positions, num_seeds)


class TypedSample:
    """See ``serve.native.TypedSample``."""

    def __init__(
        self,
        nodes: list[list[int]],
        ends: list[list[tuple[int, int]]],
        positions: list[int],
        num_seeds: int,
    ) -> None:
        self._parts = [Sample(of_type, [], positions, num_seeds) for of_type in nodes]
        self._relations = [Sample([], pairs, [], 0) for pairs in ends]
        self.num_seeds = num_seeds

    def num_nodes(self, type: int) -> int:
        """Return the number of nodes of a type."""
        return self._parts[type].num_nodes

    def num_edges(self, relation: int) -> int:
        """Return the number of edges of a relation."""
        return self._relations[relation].num_edges

    def write_nodes(self, type: int, target: BytesLike) -> None:
        """Write the node of each local id of a type, int64."""
        self._parts[type].write_nodes(target)

    def write_positions(self, target: BytesLike) -> None:
        """Write the local id of each asked id, int64."""
        self._parts[0].write_positions(target)

    def write_edges(self, relation: int, target: BytesLike, is_int32: bool) -> None:
        """Write the edges [2, E] of a relation in local ids, int32 or int64."""
        self._relations[relation].write_edges(target, is_int32)


def sample_typed(
    rows: Sequence[Topology],
    ends: Sequence[tuple[int, int]],
    keys: Sequence[int],
    num_nodes: Sequence[int],
    node_type: int,
    ids: BytesLike,
    fanouts: Sequence[int],
    seed: int,
) -> TypedSample:
    """See ``serve.native.sample_typed``."""
    asked = _flat(ids, "i8").tolist()
    for node in asked:
        if not 0 <= node < num_nodes[node_type]:
            raise ValueError(f"id {node} is not in [0, {num_nodes[node_type]})")
    locals_: list[dict[int, int]] = [{} for _ in num_nodes]
    positions = [locals_[node_type].setdefault(node, len(locals_[node_type])) for node in asked]
    num_seeds = len(locals_[node_type])
    pairs: list[list[tuple[int, int]]] = [[] for _ in rows]
    begins = [0] * len(num_nodes)
    hops = len(fanouts) // len(rows) if rows else 0
    for hop in range(hops):
        frontiers = [list(found)[begin:] for found, begin in zip(locals_, begins, strict=True)]
        firsts, begins = begins, [len(found) for found in locals_]
        for relation, (source, target) in enumerate(ends):
            fanout = fanouts[hop * len(rows) + relation]
            key = _mix(seed + (hop + 1) * _GOLDEN) ^ _mix(keys[relation])
            for local, node in enumerate(frontiers[target], firsts[target]):
                row = rows[relation].row(node)
                if 0 <= fanout < len(row):
                    row = [row[at] for at in _draw(_mix(key ^ node), len(row), fanout)]
                met = locals_[source]
                pairs[relation] += [(met.setdefault(one, len(met)), local) for one in row]
    return TypedSample([list(found) for found in locals_], pairs, positions, num_seeds)


def gather_rows(
    rows: BytesLike,
    dtype: str,
    width: int,
    patched: BytesLike,
    patched_rows: BytesLike,
    ids: BytesLike,
    target: BytesLike,
) -> None:
    """See ``serve.native.gather_rows``."""
    if dtype not in ("float32", "float16", "uint8"):
        raise ValueError(f"features are float32, float16 or uint8, not {dtype}")
    base, changed = _flat(rows, dtype).reshape(-1, width), _flat(patched, "i8")
    changed_rows, asked, place = _flat(patched_rows, "f4"), _flat(ids, "i8"), _flat(target, "f4")
    if changed_rows.size != changed.size * width or place.size != asked.size * width:
        raise ValueError("patched_rows or target does not have one row for each id")
    for row, node in zip(place.reshape(-1, width), asked, strict=True):
        at = int(np.searchsorted(changed, node))
        if at < changed.size and changed[at] == node:
            row[:] = changed_rows.reshape(-1, width)[at]
        elif 0 <= node < len(base):
            row[:] = base[node]
        else:
            raise ValueError(f"id {node} has no row")


class OffsetAllocator:
    """See ``serve.native.OffsetAllocator``."""

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, got {alignment}")
        if capacity_bytes < alignment:
            raise ValueError(
                f"capacity {capacity_bytes} is below one alignment unit of {alignment}"
            )
        self._alignment = alignment
        self.capacity_bytes = capacity_bytes - capacity_bytes % alignment
        self.used_bytes = 0
        self._taken: dict[int, int] = {}
        self._free: dict[int, int] = {0: self.capacity_bytes}

    def alloc(self, size: int) -> int:
        """Offset of a range, or -1."""
        if size < 0:
            raise ValueError(f"size must be at least 0, got {size}")
        rounded = max(1, -(-size // self._alignment)) * self._alignment
        fits = [(free, offset) for offset, free in self._free.items() if free >= rounded]
        if not fits:
            return -1
        free, offset = min(fits)
        del self._free[offset]
        if free > rounded:
            self._free[offset + rounded] = free - rounded
        self._taken[offset] = rounded
        self.used_bytes += rounded
        return offset

    def free(self, offset: int) -> None:
        """Give a range back."""
        if offset not in self._taken:
            raise ValueError(f"no range is handed out at offset {offset}")
        size = self._taken.pop(offset)
        self.used_bytes -= size
        size += self._free.pop(offset + size, 0)
        for before, free in self._free.items():
            if before + free == offset:
                self._free[before] += size
                return
        self._free[offset] = size

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that would succeed now."""
        return max(self._free.values(), default=0)


_GOLDEN, _WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def _mix(value: int) -> int:
    """SplitMix64's finalizer."""
    value &= _WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


def _draw(key: int, size: int, count: int) -> list[int]:
    """Different positions below `size`, by Floyd's method."""
    chosen: list[int] = []
    for last in range(size - count, size):
        key += _GOLDEN
        position = (_mix(key) >> 32) * (last + 1) >> 32
        chosen.append(last if position in chosen else position)
    return chosen


def _fill(target: np.ndarray[Any, np.dtype[Any]], values: list[int]) -> None:
    if target.size != len(values):
        raise ValueError(f"target has {target.size} elements, {len(values)} are written")
    target[:] = values


def _flat(buffer: Any, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer is not C-contiguous")
    if view.nbytes == 0:
        return np.empty(0, dtype)
    return np.frombuffer(view, dtype=np.uint8).view(dtype)


def _require_sizes(right: bool, what: str, source: Any, target: Any) -> None:
    if not right:
        raise ValueError(f"{what}: source has {source.nbytes} bytes, target {target.nbytes}")


def _first(bad: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    position = int(bad.argmax()) if bad.size else 0
    return position if bad.size and bad[position] else -1
