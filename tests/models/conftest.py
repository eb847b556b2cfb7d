"""A repository to break: small models written as users write them."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

MODEL_PY = textwrap.dedent(
    """
    import torch
    from torch_geometric.nn import GATv2Conv, GCNConv, global_mean_pool


    class Node(torch.nn.Module):
        def __init__(self, in_channels=9, cached=False):
            super().__init__()
            self.conv = GCNConv(in_channels, 4, cached=cached)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)


    class Weighted(Node):
        def forward(self, x, edge_index, edge_weight):
            return self.conv(x, edge_index, edge_weight)


    class Edges(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GATv2Conv(9, 4, edge_dim=3)

        def forward(self, edge_attr, x, edge_index):
            return self.conv(x, edge_index, edge_attr)


    class Pooled(Node):
        def forward(self, x, edge_index, batch):
            return global_mean_pool(self.conv(x, edge_index), batch)


    class Sum(Node):
        def forward(self, x, edge_index):
            return self.conv(x, edge_index).sum(dim=0, keepdim=True)


    class Column(Node):
        def forward(self, x, edge_index):
            return self.conv(x, edge_index)[:, 0]


    class Pair(Node):
        def forward(self, x, edge_index):
            return x, edge_index


    class Labels(Node):
        def forward(self, x, edge_index):
            return self.conv(x, edge_index).argmax(dim=1)


    class OfData(Node):
        def forward(self, data):
            return self.conv(data.x, data.edge_index)


    class Coder(Node):
        def forward(self, x, edge_index):
            raise AssertionError("it is not to be called")

        def encode(self, x, edge_index, scale=1.0):
            return scale * self.conv(x, edge_index)

        def train(self, mode=True):
            # As TGNMemory, it returns nothing.
            super().train(mode)


    class Folded(torch.nn.Module):
        # Folds features of 8 columns into rows of 4, without an error.
        def __init__(self):
            super().__init__()
            self.leave, self.wide = torch.nn.Linear(8, 3), torch.nn.Linear(4, 8)

        def forward(self, x, edge_index):
            return self.leave(self.wide(x.reshape(-1, 4)))


    class Sampled(Node):
        def forward(self, x, adjs):
            for edge_index, _, size in adjs:
                x = self.conv((x, x[: size[1]]), edge_index)
            return x


    class PerEdge(Node):
        def forward(self, x, edge_index):
            return x[edge_index[0]]


    class NeedsNodes(Node):
        def forward(self, x, edge_index):
            return self.conv(x - x.max(dim=0).values, edge_index)


    class Stateful(Node):
        def forward(self, x, edge_index):
            self.calls = getattr(self, "calls", 0) + 1
            return self.conv(x, edge_index) + self.calls


    def double():
        return Node().double()


    def not_a_module():
        return 3


    def raises():
        raise ValueError("no such width")
    """
)

Put = Callable[..., Path]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Writes `<tmp>/models/<name>`: model.py, config.toml and the weights of `weights_of`."""

    def write(
        name: str = "mine",
        factory: str = "./model.py:Node",
        more: str = "",
        weights_of: str | None = None,
        version: int = 1,
    ) -> Path:
        from safetensors.torch import save_file

        folder = tmp_path / "models" / name
        (folder / str(version)).mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(MODEL_PY)
        (folder / "config.toml").write_text(f'[model]\nfactory = "{factory}"\n{more}\n')
        names: dict = {}
        exec(MODEL_PY, names)
        module = names[weights_of or factory.rpartition(":")[2]]()
        save_file(module.state_dict(), folder / str(version) / "weights.safetensors")
        return folder

    return write
