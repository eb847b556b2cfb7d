"""What to serve where a model's forward takes edges in a form that no request has."""

from collections.abc import Sequence
from typing import NamedTuple


class _Made(NamedTuple):
    """A parameter of forward, and how it is made of `edge_index`."""

    what: str
    expression: str
    imports: str = ""


#: By its name in PyG's examples.
_MADE = {
    "adjs": _Made(
        "what a NeighborSampler draws",
        "[(edge_index, None, (len(x), len(x)))] * len(self.convs)",
    ),
    "adj_t": _Made(
        "a sparse matrix",
        "to_torch_csr_tensor(edge_index.flip(0), size=(len(x), len(x)))",
        "from torch_geometric.utils import to_torch_csr_tensor\n\n\n",
    ),
}


def wrapper(factory: str, method: str, parameters: Sequence[str]) -> str:
    """Return advice for such a model: a class to serve in its place; empty for other models.

    `parameters` are those that its forward, or another `method`, requires.
    """
    name = next((one for one in parameters if one in _MADE), None)
    if name is None or "x" not in parameters or not method.isidentifier():
        return ""
    made = _MADE[name]
    taken = ", ".join("edge_index" if one == name else one for one in parameters)
    passed = ", ".join(made.expression if one == name else one for one in parameters)
    return (
        f"its '{name}' is {made.what}, which no request holds; add a class that makes it of"
        " edge_index, and serve that:\n\n"
        f"{made.imports}"
        f"class Served({factory.rpartition(':')[2]}):\n"
        f"    def {method}(self, {taken}):\n"
        f"        return super().{method}({passed})\n"
    )
