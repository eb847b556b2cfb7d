"""CoGNN's published estimate of the peak memory of a training step, in closed form.

From the program that the authors published beside the paper, which differs from its Table II: it
counts three tensors a layer for GCN and SAGE where two are kept, and has no term for the backward
pass. Sizes are float32 values and int64 indices, each tensor rounded up to 512 bytes.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from serve.core.types import align_bytes

#: What the paper multiplies estimates by.
THRESHOLD = 1.15
#: Attention heads of all layers but the last in the published GAT.
HEADS = 8


def training_bytes(
    model: str, widths: Sequence[int], num_nodes: int, num_edges: int, num_loops: int = 0
) -> int:
    """Return the peak for layers of these widths, features first and classes last.

    A GIN has one convolution less than layers, and two linear maps at its end. Raises ValueError
    for another model than gcn, sage, gin and gat.
    """
    n, e = num_nodes, num_edges
    looped = e + n - num_loops
    layers = list(pairwise(widths))
    base = align_bytes(16 * e) + _rows(n, widths[0]) + align_bytes(8 * n)
    if model == "gcn":
        return base + align_bytes(4 * e) + _gcn(n, looped, layers)
    if model == "sage":
        return base + _sage(n, e, layers)
    if model == "gin":
        return base + _gin(n, layers, hidden=widths[1], classes=widths[-1])
    if model == "gat":
        return base + max(accumulate(_gat(n, looped, layers)))
    raise ValueError(f"model '{model}' is not one of gcn, sage, gin, gat")


def _rows(count: int, width: int) -> int:
    return align_bytes(4 * count * width)


def _gcn(n: int, looped: int, layers: Sequence[tuple[int, int]]) -> int:
    kept = peak = 0
    for _, out in layers:
        kept += 2 * _rows(n, out) + align_bytes(16 * looped) + align_bytes(4 * looped)
        peak = max(peak, kept + align_bytes(8 * looped * out))
    return peak


def _sage(n: int, e: int, layers: Sequence[tuple[int, int]]) -> int:
    kept = peak = 0
    for width, out in layers:
        peak = max(peak, kept + _rows(e, width) + _rows(n, width))
        kept += _rows(n, width) + 2 * _rows(n, out)
        peak = max(peak, kept)
    return peak


def _gin(n: int, layers: Sequence[tuple[int, int]], *, hidden: int, classes: int) -> int:
    inner = _rows(n, hidden)
    kept = inner
    for width, _ in layers[:-1]:
        kept += _rows(n, width) + 4 * inner
    return kept + 2 * (inner + _rows(n, classes)) + inner


def _gat(n: int, looped: int, layers: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield by how much the memory changes from moment to moment."""
    before = 0, 0
    for number, (_, out) in enumerate(layers):
        heads = 1 if number == len(layers) - 1 else HEADS
        linear, scores = _rows(n, out), _rows(n, heads)
        messages, weights = _rows(looped, out), _rows(looped, heads)
        yield 2 * (linear + scores)
        yield align_bytes(16 * looped) - linear
        yield messages + 2 * weights
        yield 2 * weights
        yield 2 * weights
        yield 2 * weights - scores
        yield scores
        yield 2 * weights - scores
        yield -3 * weights
        yield messages + linear
        yield -messages - 2 * (scores + weights)
        if number < len(layers) - 1:
            before = linear, weights
    yield 2 * before[0] + 16 * before[1]
