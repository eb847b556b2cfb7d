"""What the models of the gallery declare, how they are trained, and random requests for them."""

import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch_geometric.nn import models as basic

from bench.kit import gallery_models as models
from serve.commands.import_model import Source, import_model
from serve.graphs.random_inputs import declared_inputs
from serve.interface import Interface
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.model_importing import read_model
from serve.lane.models.calling import called
from serve.lane.models.declared import DeclaredForward
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.declaration import InputSection, OutputSection, interface_of
from serve.models.model_signature import Signature
from serve.models.repository import ModelSpec, find

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

    #: A callable of ``bench.kit.gallery_models``, or a class of ``torch_geometric.nn.models``.
    factory: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    args: Mapping[str, Any] = field(default_factory=dict)
    #: True for a model that is imported with the short form of inputs, without its declaration.
    short: bool = False


def _listed(numbers: Sequence[int]) -> str:
    """Return a list of TOML without spaces."""
    return f"[{','.join(map(str, numbers))}]"


def graph(features: int, *more: str) -> tuple[str, ...]:
    return (*(line.format(features=features) for line in _GRAPH), *more)


def hetero(paper: int) -> tuple[str, ...]:
    return tuple(line.format(paper=paper) for line in _HETERO)


_BATCH = "batch INT64 [N] index=G default=0"
_EDGE_ATTR = "edge_attr FP32 [E, 3]"
_HIDDEN = {"in_channels": 8, "hidden_channels": 16, "out_channels": 3}
_LAYERS = _HIDDEN | {"num_layers": 2}


def _basic(
    kind: str, args: Mapping[str, Any], inputs: tuple[str, ...] = graph(8), out: str = "[N, 3]"
) -> Entry:
    """Return a class of PyG by its bare name, with the short form of inputs."""
    return Entry(kind, inputs, (f"output FP32 {out}",), args, short=True)


#: Models of the kinds that users bring.
GALLERY = {
    "graphsage": _basic("GraphSAGE", _LAYERS),
    "rgcn": Entry("Relational", graph(16, "edge_type INT64 [E] low=0 high=4"), ("y FP32 [N, 7]",)),
    "hgt": Entry("Hetero", hetero(12), _HETERO_OUT),
    "to_hetero": Entry("to_hetero_sage", hetero(8), _HETERO_OUT),
    "gine": Entry("Gine", graph(6, _EDGE_ATTR), ("y FP32 [N, 5]",)),
    "nnconv": Entry("EdgeNetwork", graph(6, _EDGE_ATTR), ("y FP32 [N, 5]",)),
    "transformer": Entry("Transformer", graph(6, _EDGE_ATTR), ("y FP32 [N, 5]",)),
    "molecules": Entry(
        "Molecules",
        (
            "x INT64 [N, 3] low=0 high=20",
            "edge_index INT64 [2, E] index=N",
            "edge_attr INT64 [E] low=0 high=5",
            _BATCH,
        ),
        ("y FP32 [G, 1]",),
    ),
    "ogb": Entry(
        "Ogb",
        (
            f"x INT64 [N, 9] high={_listed(models.ATOMS)}",
            "edge_index INT64 [2, E] index=N",
            f"edge_attr INT64 [E, 3] high={_listed(models.BONDS)}",
            _BATCH,
        ),
        ("y FP32 [G, 1]",),
    ),
    "schnet": Entry(
        "schnet",
        ("z INT64 [N] low=1 high=20", "pos FP32 [N, 3] low=0.0 high=8.0", _BATCH),
        ("energy FP32 [G, 1]",),
    ),
    "links": Entry("Links", graph(16, "edge_label_index INT64 [2, K] index=N"), ("y FP32 [K]",)),
    "lightgcn": Entry(
        "LightGCN",
        (
            "edge_index INT64 [2, E] low=0 high=50",
            "edge_label_index INT64 [2, K] low=0 high=50",
            "edge_weight FP32 [E] default=1.0",
        ),
        ("y FP32 [K]",),
        {"num_nodes": 50, "embedding_dim": 16, "num_layers": 2},
    ),
    "recurrent": Entry(
        "GConvGRU",
        graph(4, "edge_weight FP32 [E] default=1.0", "h FP32 [N, 8] optional=true"),
        ("y FP32 [N, 2]", "h_next FP32 [N, 8]"),
    ),
    "attention": Entry("Attention", graph(16), ("y FP32 [N, 3]", "attention FP32 [E, 2]")),
    "unet": _basic("GraphUNet", _HIDDEN | {"depth": 2, "pool_ratios": 0.5}),
}

_SOFT = (*graph(8), "batch INT64 [N] index=G")
#: Classes of PyG by their bare names, beside those of the gallery: one of each kind of inputs and
#: outputs. `bench.models.coverage` tries all classes.
BASIC = {
    "mlp": _basic("MLP", _LAYERS, graph(8)[:1]),
    "pna": _basic("pna", {}),
    "attentive_fp": _basic(
        "AttentiveFP",
        _LAYERS | {"edge_dim": 4, "num_timesteps": 2},
        (*graph(8, "edge_attr FP32 [E, 4]"), _SOFT[-1]),
        "[G, 3]",
    ),
    "sgformer": _basic("SGFormer", _HIDDEN, _SOFT),
    "ar_links": Entry("ARLinkPredictor", graph(8), ("scores FP32 [E]",), _LAYERS),
    "linkx": Entry(
        "LINKX",
        ("x FP32 [50, 8]", "edge_index INT64 [2, E] low=0 high=50"),
        ("y FP32 [50, 3]",),
        _LAYERS | {"num_nodes": 50},
    ),
    "signed": Entry(
        "SignedGCN",
        (
            "x FP32 [N, 8]",
            "pos_edge_index INT64 [2, P] index=N",
            "neg_edge_index INT64 [2, M] index=N",
        ),
        ("y FP32 [N, 16]",),
        {"in_channels": 8, "hidden_channels": 16, "num_layers": 2},
    ),
    "mask_label": Entry(
        "MaskLabel",
        ("x FP32 [N, 8]", "y INT64 [N] low=0 high=3", "mask BOOL [N]"),
        ("out FP32 [N, 8]",),
        {"num_classes": 3, "out_channels": 8},
    ),
}
_ALL = GALLERY | BASIC


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


def factory(entry: Entry) -> tuple[str, Callable[..., torch.nn.Module]]:
    """Return the factory as `gnnserve import` takes it, and what it names."""
    kind = getattr(basic, entry.factory, None)
    if isinstance(kind, type):
        return f"{basic.__name__}:{entry.factory}", kind
    return f"{models.__file__}:{entry.factory}", getattr(models, entry.factory)


def described(name: str) -> Interface:
    """Return what the model takes and returns, whether its folder declares that or not."""
    sections = tomllib.loads(declaration(_ALL[name]))["model"]
    return interface_of(
        msgspec.convert(sections["input"], tuple[InputSection, ...]),
        msgspec.convert(sections["output"], tuple[OutputSection, ...]),
        name,
    )


def trained(name: str) -> torch.nn.Module:
    """Return the model after a few steps of training towards small outputs."""
    entry = _ALL[name]
    interface = described(name)
    torch.manual_seed(0)
    module = factory(entry)[1](**entry.args)
    spec = _spec(name, interface)
    forward = DeclaredForward(called(module, spec), interface, name)
    module.train()
    for step in range(3):
        arrays = _request(interface, interface.spread(40, 160), seed=step)
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        outputs = forward(called(module, spec), tensors)
        if step == 0:  # lazy layers have parameters from now on
            optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        loss = torch.stack([(output**2).mean() for output in outputs]).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    module.eval()
    module.requires_grad_(False)
    return module


def load(name: str) -> LoadedModel:
    """Return the trained model as a lane holds it, without a repository, with a declaration."""
    interface = described(name)
    spec = _spec(name, interface)
    module = called(trained(name), spec)
    return LoadedModel(spec, module, declared=DeclaredForward(module, interface, spec.key))


def write(root: Path, name: str) -> LoadedModel:
    """Train a model, save its state and import it into `root`; return what this process loads."""
    entry = _ALL[name]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        torch.save(trained(name).state_dict(), weights)
        source = Source(
            factory=factory(entry)[0],
            weights=weights,
            args=dict(entry.args),
            inputs=tuple(line.split()[0] for line in entry.inputs) if entry.short else (),
            declaration="" if entry.short else declaration(entry),
        )
        import_model(root, name, source, lambda *_: None, read=read_model, trial=tried)
    return load_model(find(root, name))


def tried(spec: ModelSpec) -> Signature:
    """Run a model on small graphs in this process."""
    return probe_signature(load_model(spec))


def interface(loaded: LoadedModel) -> Interface:
    """Return what a model of the gallery takes and returns."""
    return loaded.spec.interface or described(loaded.spec.name)


def request(loaded: LoadedModel, counts: Sequence[int], seed: int) -> dict[str, Any]:
    """Return random arrays for every input, three graphs where there are any."""
    return _request(interface(loaded), counts, seed)


def _request(interface: Interface, counts: Sequence[int], seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return declared_inputs(
        interface, counts, rng, graphs=lambda things: np.arange(things) * 3 // things
    )


def expected(loaded: LoadedModel, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return what PyG answers in this process."""
    outputs = loaded.outputs({name: torch.from_numpy(array) for name, array in arrays.items()})
    names = [slot.name for slot in interface(loaded).outputs]
    return {name: output.numpy() for name, output in zip(names, outputs, strict=True)}


def _spec(name: str, interface: Interface) -> ModelSpec:
    return ModelSpec(
        name=name, version=1, folder="", factory="", args={}, weights="", weights_bytes=0,
        inputs=tuple(slot.name for slot in interface.inputs), interface=interface, qos_factor=None,
    )  # fmt: skip
