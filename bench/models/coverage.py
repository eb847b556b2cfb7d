"""Which classes of PyG serve as a model of their own, with declared inputs?

Every class of `torch_geometric.nn.models` and `nn.conv` is built with small arguments. The inputs
of its forward are declared by their usual meaning, and its outputs by what it returns. Then it goes
through what the server does with a new model: it is run on graphs of several sizes with its outputs
checked, and its memory is measured. Convolutions from sources to targets are tried as such too.
"""

import argparse
import importlib
import inspect
import re
import warnings
from contextlib import suppress
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from bench.kit import pyg_classes
from bench.kit.script import Script, Table
from serve.interface import InputSlot, Interface
from serve.lane.example_outputs import outputs_of
from serve.lane.measure.memory import measure_memory
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.models.calling import called
from serve.lane.models.declared import DeclaredForward
from serve.lane.models.loader import LoadedModel
from serve.models.repository import ModelSpec

PACKAGES = ("torch_geometric.nn.models", "torch_geometric.nn.conv")
SCRIPT = Script(
    "coverage",
    full={"names": ("",), "limit_mib": 64},
    quick={"names": ("GCN", "RGCNConv", "JumpingKnowledge"), "limit_mib": 16},
    tables=(
        Table("Classes of PyG as models of their own", "rows",
              {"class": "{name}", "serves": "{serves}", "inputs, or why not": "{told}"}),
    ),
)  # fmt: skip

_NEEDS = re.compile(r"'(\w+)' requires '([\w-]+)|No module named '(\w+)'")


def tried(module: nn.Module, slots: tuple[InputSlot, ...], limit_mib: int) -> str:
    """Take one class through what the server does with a new model; returns its inputs.

    Raises what stands in the way.
    """
    name = type(module).__name__
    spec = ModelSpec(
        name=name, version=1, folder="", factory="", args={}, weights="", weights_bytes=0,
        inputs=tuple(slot.name for slot in slots), qos_factor=None,
        method=pyg_classes.METHODS.get(name, "forward"),
        method_args=pyg_classes.METHOD_ARGS.get(name, {}),
    )  # fmt: skip
    module = called(module, spec)
    interface = Interface(slots, outputs_of(module, slots))
    spec = replace(spec, interface=interface)
    loaded = LoadedModel(spec, module, declared=DeclaredForward(module, interface, name))
    signature = probe_signature(loaded)
    measure_memory(loaded, signature, max_bytes=limit_mib << 20)
    return ", ".join(spec.inputs)


def reason(name: str, error: Exception) -> str:
    """Return in one sentence why a class does not serve."""
    if name in pyg_classes.CANNOT:
        return pyg_classes.CANNOT[name]
    found = _NEEDS.search(str(error))
    if found is not None:
        needs = found[2] or found[3]
        own = found[1] in (None, name)
        return f"{'It' if own else f'Its {found[1]}'} needs {needs}, which was not installed."
    return f"It fails: {type(error).__name__}: {str(error).splitlines()[0][:110]}."


def row(package: str, name: str, limit_mib: int) -> dict[str, Any]:
    """Return what one class takes, or why it does not serve."""
    kind = getattr(importlib.import_module(package), name)
    told, serves = "", False
    try:
        if name in pyg_classes.CANNOT:
            raise ValueError(pyg_classes.CANNOT[name])
        module = pyg_classes.build(kind)
        told = tried(module, pyg_classes.inputs(module), limit_mib)
        serves = True
    except Exception as error:
        told = reason(name, error)
    found: dict[str, Any] = {
        "package": package.rpartition(".")[2],
        "name": name,
        "serves": serves,
        "told": told,
    }
    if serves and told.startswith("x, ") and package.endswith("conv"):
        found["bipartite"] = serves_pairs(kind, limit_mib)
    return found


def serves_pairs(kind: type[nn.Module], limit_mib: int) -> bool:
    """Return True when a convolution serves with features of sources and of targets."""
    for columns in (pyg_classes.F, (pyg_classes.F, pyg_classes.F)):
        with suppress(Exception):
            module = pyg_classes.build(kind, in_channels=columns)
            tried(module, pyg_classes.pairs(module), limit_mib)
            return True
    return False


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Try all classes, or those named."""
    return {
        "rows": [
            row(package, name, options.limit_mib)
            for package in PACKAGES
            for name in importlib.import_module(package).__all__
            if not any(options.names) or name in options.names
            if inspect.isclass(getattr(importlib.import_module(package), name))
        ]
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    SCRIPT.main(measure, __doc__)
