"""What the models of the gallery declare, how they are trained, and random requests for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kit import gallery_models as models
from serve.graphs.random_inputs import declared_inputs
from serve.interface import Interface
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.repository import find
from serve.models.writer import write_model

_GRAPH = (
    "x FP32 [N, {features}]",
    "edge_index INT64 [2, E] index=N",
)
_HETERO = (
    "x.author FP32 [N.author, 8]",
    "x.paper FP32 [N.paper, {paper}]",
    "edge_index.author__writes__paper INT64 [2, E.writes] index=N.author,N.paper",
    "edge_index.paper__cites__paper INT64 [2, E.cites] index=N.paper",
    "edge_index.paper__by__author INT64 [2, E.by] index=N.paper,N.author",
)
_HETERO_OUT = ("author FP32 [N.author, 4]", "paper FP32 [N.paper, 4]")


@dataclass(frozen=True)
class Entry:
    """One model; lines of its declaration are `name dtype [shape] key=value …`."""

    factory: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def graph(features: int, *more: str) -> tuple[str, ...]:
    return (*(line.format(features=features) for line in _GRAPH), *more)


def hetero(paper: int) -> tuple[str, ...]:
    return tuple(line.format(paper=paper) for line in _HETERO)


GALLERY = {
    "rgcn": Entry("Relational", graph(16, "edge_type INT64 [E] low=0 high=4"), ("y FP32 [N, 7]",)),
    "hgt": Entry("Hetero", hetero(12), _HETERO_OUT),
    "to_hetero": Entry("to_hetero_sage", hetero(8), _HETERO_OUT),
    "molecules": Entry(
        "Molecules",
        (
            "x INT64 [N, 3] low=0 high=20",
            "edge_index INT64 [2, E] index=N",
            "edge_attr INT64 [E] low=0 high=5",
            "batch INT64 [N] index=G default=0",
        ),
        ("y FP32 [G, 1]",),
    ),
    "edge_network": Entry("EdgeNetwork", graph(6, "edge_attr FP32 [E, 3]"), ("y FP32 [N, 5]",)),
    "schnet": Entry(
        "schnet",
        (
            "z INT64 [N] low=1 high=20",
            "pos FP32 [N, 3] low=0.0 high=8.0",
            "batch INT64 [N] index=G default=0",
        ),
        ("energy FP32 [G, 1]",),
    ),
    "links": Entry("Links", graph(16, "edge_label_index INT64 [2, K] index=N"), ("y FP32 [K]",)),
    "lightgcn": Entry(
        "lightgcn",
        (
            "edge_index INT64 [2, E] low=0 high=50",
            "edge_label_index INT64 [2, K] low=0 high=50",
            "edge_weight FP32 [E] default=1.0",
        ),
        ("y FP32 [K]",),
    ),
    "recurrent": Entry(
        "RecurrentCell",
        graph(4, "edge_weight FP32 [E] default=1.0", "h FP32 [N, 8] optional=true"),
        ("y FP32 [N, 2]", "h_next FP32 [N, 8]"),
    ),
    "attention": Entry("Attention", graph(16), ("y FP32 [N, 3]", "attention FP32 [E, 2]")),
    "unet": Entry("unet", graph(8), ("y FP32 [N, 3]",)),
}


def declaration(entry: Entry) -> str:
    """Return the declaration as TOML."""
    return "\n".join(
        f"[[model.{kind}]]\n{_table(line)}\n"
        for kind, lines in (("input", entry.inputs), ("output", entry.outputs))
        for line in lines
    )


def _table(line: str) -> str:
    name, dtype, rest = line.split(" ", 2)
    shape, _, keys = rest.partition("]")
    dims = ", ".join(d if d.isdecimal() else f'"{d}"' for d in shape.strip("[ ").split(", "))
    found = [f'name = "{name}"', f'dtype = "{dtype}"', f"shape = [{dims}]"]
    for key, _, value in (one.partition("=") for one in keys.split()):
        if key == "index":
            value = "[" + ", ".join(f'"{symbol}"' for symbol in value.split(",")) + "]"
        found.append(f"{key} = {value}")
    return "\n".join(found)


def write(root: Path, name: str) -> LoadedModel:
    """Write a model trained for a few steps under `root`; return it as this process runs it."""
    entry = GALLERY[name]
    torch.manual_seed(0)
    module = getattr(models, entry.factory)()
    folder = write_model(
        root, name, module, factory=f"./model.py:{entry.factory}", args={},
        declaration=declaration(entry),
    )  # fmt: skip
    (folder / "model.py").write_bytes(Path(models.__file__).read_bytes())
    loaded = load_model(find(root, name))
    _train(loaded)
    write_model(
        root, name, loaded.module, factory=f"./model.py:{entry.factory}", args={},
        declaration=declaration(entry),
    )  # fmt: skip
    return load_model(find(root, name))


def interface(loaded: LoadedModel) -> Interface:
    found = loaded.spec.interface
    assert found is not None
    return found


def request(loaded: LoadedModel, counts: Sequence[int], seed: int) -> dict[str, Any]:
    """Return random arrays for every input, three graphs where there are any."""
    rng = np.random.default_rng(seed)
    return declared_inputs(
        interface(loaded), counts, rng, graphs=lambda things: np.arange(things) * 3 // things
    )


def expected(loaded: LoadedModel, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return what PyG answers in this process."""
    outputs = loaded.outputs({name: torch.from_numpy(array) for name, array in arrays.items()})
    names = [slot.name for slot in interface(loaded).outputs]
    return {name: output.numpy() for name, output in zip(names, outputs, strict=True)}


def _train(loaded: LoadedModel) -> None:
    """Take a few steps of training towards small outputs."""
    module = loaded.module.train().requires_grad_(True)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    declared = loaded.declared
    assert declared is not None
    for step in range(3):
        arrays = request(loaded, interface(loaded).spread(40, 160), seed=step)
        outputs = declared(module, {k: torch.from_numpy(a) for k, a in arrays.items()})
        loss = torch.stack([(output**2).mean() for output in outputs]).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    module.eval().requires_grad_(False)
