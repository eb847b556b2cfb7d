"""A model with an input of every datatype, and one whose graphs hold two kinds of things."""

import tomllib

import msgspec
import torch
from torch import Tensor, nn

from bench.kit.gallery import Entry, declaration
from serve.interface import Interface
from serve.models.declaration import InputSection, OutputSection, interface_of


def declared_by(entry: Entry) -> Interface:
    """Return what an entry declares."""
    sections = tomllib.loads(declaration(entry))["model"]
    return interface_of(
        msgspec.convert(sections["input"], tuple[InputSection, ...]),
        msgspec.convert(sections["output"], tuple[OutputSection, ...]),
        "it",
    )


#: Authors, papers, and which author has written which paper.
KINDS = Entry(
    "",
    (
        "x FP16 [A, 3]",
        "kind INT8 [A] low=-5 high=91",
        "writes INT64 [2, W] index=A,P",
        "first INT32 [W] index=P",
        "known BOOL [P]",
        "graph INT64 [P] index=G default=0",
        "year INT16 [P] low=1900 high=2101 default=2000",
        "score FP64 [W] optional=true",
        "level UINT8 [P] low=3 high=200 optional=true",
        "number INT32 [P] low=-100 high=1000 optional=true",
        "serial INT64 [P] low=-1e18 high=1e18 optional=true",
    ),
    ("y FP32 [A, 2]", "z FP64 [P]", "papers INT64 [G]", "best BOOL [P]"),
)


class Kinds(nn.Module):
    """Adds everything up."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(
        self, x: Tensor, kind: Tensor, writes: Tensor, first: Tensor, known: Tensor, graph: Tensor,
        year: Tensor, score: Tensor | None, level: Tensor | None, number: Tensor | None,
        serial: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        worth = torch.ones(writes.shape[1], dtype=torch.double) if score is None else score
        z = torch.zeros(len(known), dtype=torch.double).index_add(0, writes[1], worth)
        z = z.index_add(0, first.long(), worth / 2) + known + year
        for more in (level, number, serial):
            if more is not None:
                z = z + more
        y = (x.float().sum(1) + kind).index_add(0, writes[0], worth.float())
        graphs = int(graph.max()) + 1 if len(graph) else 0
        papers = torch.zeros(graphs, dtype=torch.long).index_add(0, graph, torch.ones_like(graph))
        return y[:, None] * self.scale, z, papers, z > 2000


def build() -> nn.Module:
    return Kinds()


#: Graphs of things of two kinds, of which a graph may have none.
POOLED = Entry(
    "",
    (
        "x.a FP32 [A, 2]",
        "batch.a INT64 [A] index=G",
        "x.b FP32 [B, 2]",
        "batch.b INT64 [B] index=G",
    ),
    ("y FP32 [G, 2]", "graphs INT64 [A]"),
)


class PooledKinds(nn.Module):
    """Adds up the things of each graph, and tells each how many graphs of its request precede."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(
        self, x_dict: dict[str, Tensor], batch_dict: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        graphs = max((int(b.max()) + 1 for b in batch_dict.values() if len(b)), default=0)
        y = torch.zeros(graphs, 2)
        for kind, x in x_dict.items():
            y = y.index_add(0, batch_dict[kind], x)
        of_b = torch.bincount(batch_dict["b"], minlength=graphs)
        return y * self.scale, of_b[batch_dict["a"]]


def build_pooled() -> nn.Module:
    return PooledKinds()
