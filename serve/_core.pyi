"""Compiled part of gnnserve; use it through serve.native."""

from collections.abc import Sequence

import serve._twin


def stage_indices(src: serve._twin.BytesLike, is_int32: bool, bound: int, dst: serve._twin.BytesLike, narrow: bool = False) -> int: ...

def stage_features(src: serve._twin.BytesLike, dst: serve._twin.BytesLike, check_finite: bool) -> int: ...

def define_operators() -> None: ...

MOST_HEADS: int = 64

class OffsetAllocator:
    """
    Hands out ranges of a region it never touches, such as a shared memory file.

    Best fit: the smallest free range that holds the request, the lowest of equal ones;
    freed ranges merge with their neighbours at once. Not thread-safe.
    """

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        """
        `alignment` is a power of two; the capacity is rounded down to a multiple of it.
        """

    def alloc(self, size: int) -> int:
        """
        Offset of a range of at least `size` bytes, or -1 when no free range is that long.

        An empty range takes one alignment unit, so that offsets are unique.
        Raises ValueError for a negative size.
        """

    def free(self, offset: int) -> None:
        """
        Give a range back; raises ValueError when none is handed out at `offset`.
        """

    @property
    def capacity_bytes(self) -> int:
        """What it manages."""

    @property
    def used_bytes(self) -> int:
        """Handed out now, each range rounded up to the alignment."""

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that would succeed now."""

class Topology:
    """
    In-neighbours by destination, and rows changed since; holds its buffers.
    """

    def __init__(self, num_nodes: int, indptr: serve._twin.BytesLike, indices: serve._twin.BytesLike, is_int32: bool, patched: serve._twin.BytesLike, patched_indptr: serve._twin.BytesLike, patched_indices: serve._twin.BytesLike) -> None: ...

class Sample:
    """A sampled subgraph."""

    @property
    def num_nodes(self) -> int:
        """Nodes, the asked ones first."""

    @property
    def num_edges(self) -> int:
        """Edges, sorted by destination."""

    @property
    def num_seeds(self) -> int:
        """Different nodes among those asked."""

    def write_nodes(self, target: serve._twin.BytesLike) -> None:
        """Write the node of each local id, int64."""

    def write_positions(self, target: serve._twin.BytesLike) -> None:
        """Write the local id of each asked id, int64."""

    def write_edges(self, target: serve._twin.BytesLike, is_int32: bool) -> None:
        """Write the edges [2, E] in local ids, int32 or int64."""

def sample_neighbours(topology: Topology, ids: serve._twin.BytesLike, fanouts: Sequence[int], seed: int) -> Sample: ...

def build_rows(edges: serve._twin.BytesLike, is_int32: bool, num_nodes: int, indptr: serve._twin.BytesLike, indices: serve._twin.BytesLike, narrow: bool) -> int: ...

def gather_rows(rows: serve._twin.BytesLike, dtype: str, width: int, patched: serve._twin.BytesLike, patched_rows: serve._twin.BytesLike, ids: serve._twin.BytesLike, target: serve._twin.BytesLike) -> None: ...

def decode_infer(is_request: bool, message: bytes | memoryview) -> serve._twin.Infer | None: ...

def encode_infer(is_request: bool, model: str, version: str, id: str, parameters: serve._twin.Parameters, tensors: Sequence[serve._twin.TensorHead], raws: Sequence[memoryview]) -> bytes | None: ...
