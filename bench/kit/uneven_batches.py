"""Sizes of the graphs of batches: one large among small ones, all sizes, and all alike."""

from collections.abc import Iterator

import numpy as np

#: Fewest and most nodes of the large graph, most of small ones, and what graphs and the largest
#: may make with padding.
_LARGE = 2, 300
_SMALL = 30
_MOST_PADDED = 20_000


def uneven_graphs(rng: np.random.Generator, count: int) -> Iterator[list[int]]:
    """Yield the sizes of the graphs of `count` batches, each of a kind drawn at random.

    In half of them one graph is large and the others are small; in a quarter sizes are even in the
    logarithm; in a quarter all are equal. The places of the graphs in the batch are random.
    """
    for _ in range(count):
        largest = int(np.exp(rng.uniform(*np.log(_LARGE))))
        most = max(1, _MOST_PADDED // largest)
        graphs = int(np.exp(rng.uniform(0, np.log(min(most, 500)))))
        kind = rng.integers(4)
        if kind < 2:
            sizes = rng.integers(1, min(_SMALL, largest) + 1, graphs)
        elif kind == 2:
            sizes = np.exp(rng.uniform(0, np.log(largest), graphs)).astype(int)
        else:
            sizes = np.full(graphs, largest)
        yield rng.permutation([*sizes.tolist(), largest]).tolist()
