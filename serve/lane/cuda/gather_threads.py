"""Find the part of a GPU that a gather over the bus takes: the fewest threads that keep it busy.

The bus limits a gather, not the GPU: a twelfth of an H200's threads should do. More of them would
only keep multiprocessors from the kernels of other lanes (PyTorch-Direct, Min et al. 2021, figure
10). How many it takes follows from the bus, its latency, and how much a thread reads at once, which
the width of the rows decides. So it is measured for each model, when that is calibrated.
"""

import logging
from collections.abc import Mapping

import torch

from serve.lane import clock
from serve.lane.cuda.arena import LaneMemory
from serve.lane.cuda.cuda_queue import Pinned
from serve.lane.cuda.queues import Queue
from serve.lane.error_text import told

_log = logging.getLogger(__name__)

#: Bounds of the grid that are tried.
THREADS = tuple(1 << power for power in range(13, 19))
#: The fewest threads with this share of the best speed are taken.
ENOUGH = 0.95
#: Bytes gathered in one run: 1.2 ms at 55 GB/s, in which a launch does not count.
_GATHERED_BYTES = 64 << 20
_ROUNDS = 3


def fewest_threads(seconds: Mapping[int, float]) -> int:
    """Return the fewest threads that gather at ``ENOUGH`` of the best speed, by what each took."""
    best = min(seconds.values())
    return min(threads for threads, taken in seconds.items() if best >= ENOUGH * taken)


def find_threads(queue: Queue, pinned: Pinned, memory: LaneMemory | None, num_features: int) -> int:
    """Return the fewest threads for rows of that many float32; 0 where that cannot be measured.

    Gathered rows lie in a buffer of `memory`, which has none at the time; None where torch places
    them.
    """
    rows = max(1, _GATHERED_BYTES // (4 * num_features))
    try:
        found = fewest_threads(_seconds(queue, pinned, memory, rows, num_features))
    # Models serve without it. A ``CudaError`` is a RuntimeError.
    except (RuntimeError, MemoryError) as error:
        _log.info("how many threads a gather needs is not measured: %s", told(error))
        return 0
    _log.info("rows of %d features are gathered by %d threads", num_features, found)
    return found


def _seconds(
    queue: Queue, pinned: Pinned, memory: LaneMemory | None, rows: int, num_features: int
) -> dict[int, float]:
    """Return the shortest time of gathering so many rows in random order, by threads."""
    # Zeros, written, so that every page is there before it is pinned.
    table = torch.zeros(rows, num_features)
    pinned.register(table.data_ptr(), table.nbytes)
    try:
        if memory is not None:
            memory.insert(memory.most_bytes())
        try:
            return _timed(queue, table)
        finally:
            if memory is not None:
                memory.clear()
    finally:
        pinned.unregister(table.data_ptr())


def _timed(queue: Queue, table: torch.Tensor) -> dict[int, float]:
    """Return the shortest time of gathering all rows in random order, by threads."""
    ids = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    found = dict.fromkeys(THREADS, float("inf"))
    with queue.running():
        placed = queue.upload({"ids": ids})["ids"]
        # The first round is not counted.
        for number in range(1 + _ROUNDS):
            for threads in THREADS:
                queue.finish()
                began_ns = clock.now_ns()
                queue.gather(table, ids, placed=placed, threads=threads)
                queue.finish()
                if number:
                    found[threads] = min(found[threads], (clock.now_ns() - began_ns) / 1e9)
    return found
