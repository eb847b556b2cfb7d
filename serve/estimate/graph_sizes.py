"""How the things of a request are divided into graphs, as its `batch` tells.

A model may need more or less for the same counts by how large its graphs are: when it works on
pairs of things in one graph, or pads every graph to the largest. The counts of its requests then go
on with numbers that tell that, and its estimates are functions of terms that follow from them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np


class GraphSizes(NamedTuple):
    """Sizes of a request's graphs, in things of one kind."""

    #: Σ n² over graphs of n things: pairs of things in one graph, each with itself included.
    pairs: int
    #: Graphs, the empty ones before the last included.
    graphs: int
    #: Things of the largest.
    most: int


def one_graph(things: int) -> GraphSizes:
    """Return the sizes where all things are in one graph."""
    return GraphSizes(things**2, min(1, things), things)


def graph_sizes(
    batches: Iterable[tuple[str, int]], arrays: Mapping[str, Any], counts: Sequence[int]
) -> list[GraphSizes]:
    """Return the sizes of graphs in the things of each of `batches`, see ``ModelSpec.batches``.

    The values of `arrays` number graphs. Without an array all things are in one graph.
    """
    return same_graphs([
        one_graph(counts[position])
        if (values := arrays.get(name)) is None
        else _counted(np.bincount(np.asarray(values)))
        for name, position in batches
    ])  # fmt: skip


def same_graphs(sizes: Sequence[GraphSizes]) -> list[GraphSizes]:
    """Return sizes with as many graphs of each kind of things: any kind may be in any graph."""
    graphs = max((one.graphs for one in sizes), default=0)
    return [one._replace(graphs=graphs) for one in sizes]


def _counted(things: np.ndarray[Any, np.dtype[np.int64]]) -> GraphSizes:
    return GraphSizes(int((things**2).sum()), len(things), int(things.max(initial=0)))


class GraphTerms(msgspec.Struct, frozen=True):
    """What a model's estimates depend on besides its counts: nothing, pairs, or padding too.

    Where the sizes of graphs are not told, all things are in one graph.
    """

    #: Positions of the counts of things whose graphs' sizes decide; empty where they do nothing.
    of: tuple[int, ...] = ()
    #: Graphs are padded to the largest.
    padded: bool = False

    def told(self, sizes: Sequence[GraphSizes]) -> tuple[int, ...]:
        """Return what a request's counts go on with: pairs, then graphs and the largest if padded.

        `sizes` are those of the things at `of`.
        """
        if self.padded:
            return tuple(value for each in zip(*sizes, strict=True) for value in each)
        return tuple(one.pairs for one in sizes)

    def complete(self, counts: tuple[int, ...], own: int) -> tuple[int, ...]:
        """Return counts, of which `own` are told by shapes, with what they go on with."""
        if not self.of or len(counts) > own:
            return counts
        return counts + self.told([one_graph(counts[position]) for position in self.of])

    def terms(self, counts: tuple[int, ...], own: int) -> tuple[int, ...]:
        """Return the terms of an estimate: the counts and the pairs.

        Where graphs are padded, there follow graphs, things with padding, and pairs with padding:
        G, G · m and G · m² for G graphs, the largest with m things.
        """
        counts = self.complete(counts, own)
        if not self.padded:
            return counts
        known, kinds = own + len(self.of), len(self.of)
        graphs, most = counts[known : known + kinds], counts[known + kinds :]
        both = list(zip(graphs, most, strict=True))
        return (
            *counts[:known],
            *graphs,
            *(count * size for count, size in both),
            *(count * size**2 for count, size in both),
        )

    def joined(self, sizes: Sequence[tuple[int, ...]], own: int) -> tuple[int, ...]:
        """Return the counts of the disjoint union of requests with these.

        All counts add up, but that of the largest graph's things.
        """
        if len(sizes) == 1:
            return sizes[0]
        each = list(zip(*(self.complete(counts, own) for counts in sizes), strict=True))
        last = len(each) - len(self.of) * self.padded
        return (*map(sum, each[:last]), *map(max, each[last:]))


#: Estimates depend on counts alone.
COUNTS_ALONE = GraphTerms()
