"""What `gnnserve graph import` asks of the process that reads a graph, and what that tells."""

import msgspec


class GraphOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A graph saved by `torch.save`, and where to write its arrays."""

    source: str
    #: .safetensors or .npz.
    target: str


class GraphRead(msgspec.Struct, frozen=True, kw_only=True):
    """What was read."""

    #: What was changed or left out, in sentences.
    notes: tuple[str, ...] = ()
    #: Why nothing was written; empty when it was.
    error: str = ""
