"""What is asked of the process that reads graphs with torch, and what that tells."""

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


class GraphsOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Files of graphs saved by `torch.save`, of which to write the tensors into one file."""

    sources: tuple[str, ...]
    #: .safetensors; its tensors are named `NUMBER/NAME`, in the order of ``GraphsRead.graphs``.
    target: str
    #: Most graphs to take of each file, evenly spaced.
    most_each: int


class GraphsRead(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of several files."""

    #: Which file each graph is of, and which of its graphs it is.
    graphs: tuple[tuple[int, int], ...] = ()
    #: Graphs in each file.
    totals: tuple[int, ...] = ()
    #: Why nothing was written; empty when it was.
    error: str = ""
