"""The block of the pool that a joint request's models share: each tensor is staged in it once.

A joint request asks several models about one graph. Every model has a task of its own, and takes
some of the tensors that were sent. A tensor that two models take alike has one place. Lanes map it
privately (``serve.lane.task``), so that a model that works in place changes the input of no other.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from serve.ipc.messages import TensorRef
from serve.ipc.shared_pool import Block, SharedPool
from serve.server.staging import Layout, TensorKey, aligned, key_of, take_block


class JointBlock:
    """Places for the inputs and outputs of several tasks.

    Its users stage in one thread, and let go of it under the driver's lock.
    """

    def __init__(self, pool: SharedPool) -> None:
        """Plan nothing yet, and take no memory."""
        #: Tensors that are copied, and checked as models of the short form check them.
        self.staged: set[TensorKey] = set()
        self._pool = pool
        self._places: dict[TensorKey, TensorRef] = {}
        self._size_bytes = 0
        self._block: Block | None = None
        self._users = 0

    def plan(self, layout: Layout) -> Layout:
        """Return the places of one more user's tensors, which are new or another user's too."""
        self._users += 1
        inputs = tuple(self._places.get(key_of(ref)) or self._add(ref) for ref in layout.inputs)
        output_at_bytes = self._size_bytes
        self._size_bytes += layout.output_capacity_bytes
        return replace(layout, inputs=inputs, output_at_bytes=output_at_bytes)

    def take(self) -> Block:
        """Return the block, which is allocated on first use; raises QueueFull without room."""
        if self._block is None:
            self._block = take_block(self._pool, self._size_bytes)
        return self._block

    def leave(self) -> None:
        """Let go of it, once for each user; the last one frees the block."""
        self._users -= 1
        if not self._users and self._block is not None:
            block, self._block = self._block, None
            self._pool.free(block)

    def _add(self, ref: TensorRef) -> TensorRef:
        place = TensorRef(ref.name, ref.dtype, ref.shape, self._size_bytes)
        self._places[key_of(ref)] = place
        self._size_bytes += aligned(ref.size_bytes)
        return place


def common_bytes(layouts: Iterable[Layout]) -> int:
    """Return the bytes of the tensors that all the layouts have."""
    found = [{key_of(ref): aligned(ref.size_bytes) for ref in each.inputs} for each in layouts]
    common = set.intersection(*(set(sizes) for sizes in found))
    return sum(found[0][key] for key in common)
