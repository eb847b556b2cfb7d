"""Two models on the generated academic graph, written to a repository, and their answers here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.kit import academic_models as models
from bench.kit.gallery import Entry, declaration
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.repository import find
from serve.models.writer import write_model
from serve.typed_names import edge_type

_X = (
    "x.author FP32 [N.author, 8]",
    "x.paper FP32 [N.paper, 16]",
    "x.venue FP32 [N.venue, 4]",
)
_EDGES = tuple(
    f"edge_index.{edge_type(*kind)} INT64 [2, E.{kind[1]}] index=N.{kind[0]},N.{kind[2]}"
    for kind in models.EDGES
)
#: HGT on features and years, for papers; and to_hetero of a SAGE, for nodes of every type.
MODELS = {
    "hgt": Entry(
        "Hgt",
        (*_X, *_EDGES, "year.paper INT64 [N.paper] low=1990 high=2030"),
        ("y FP32 [N.paper, 4]",),
    ),
    "sage": Entry(
        "hetero_sage",
        (*_X, *_EDGES),
        tuple(f"{name} FP32 [N.{name}, 4]" for name in models.TYPES),
    ),
}


def write(root: Path, name: str) -> LoadedModel:
    """Write a model with random weights under `root`; return it as this process runs it."""
    entry = MODELS[name]
    torch.manual_seed(0)
    module = getattr(models, entry.factory)()
    folder = write_model(
        root, name, module, factory=f"./model.py:{entry.factory}", args={},
        declaration=declaration(entry),
    )  # fmt: skip
    (folder / "model.py").write_bytes(Path(models.__file__).read_bytes())
    return load_model(find(root, name))


def answers(loaded: LoadedModel, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return what PyG answers in this process to the arrays that the model takes."""
    interface = loaded.spec.interface
    assert interface is not None
    given = {
        slot.name: torch.from_numpy(np.asarray(arrays[slot.name])) for slot in interface.inputs
    }
    return {
        slot.name: output.numpy()
        for slot, output in zip(interface.outputs, loaded.outputs(given), strict=True)
    }
