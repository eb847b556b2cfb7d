"""Call a model as its configuration says: another method than forward, or with a `Data`.

`model.method` names what to call instead of forward, and `model.method_args` holds arguments of it
that are the same in every request. Where forward takes a graph of PyG, `forward(self, data)`, the
tensors of a request become the attributes of a `Data`, or of a `HeteroData` where they belong to
several types.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from serve.errors import ModelError
from serve.models.repository import ModelSpec


class CalledModel(torch.nn.Module):
    """A model, called by something else than its forward."""

    def __init__(self, model: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        # Its parameters are those of what it calls.
        self.forward = call


def called(module: torch.nn.Module, spec: ModelSpec) -> torch.nn.Module:
    """Return a module whose forward takes the tensors of a request.

    It is `module` itself where forward does. Raises ModelError when it has no such method.
    """
    method = method_of(module, spec)
    # A name before a dot is one argument, whatever follows.
    names = list(dict.fromkeys(name.partition(".")[0] for name in spec.inputs))
    if takes_data(method, names):
        return CalledModel(module, _with_data(method, names, spec.method_args))
    if spec.method == "forward" and not spec.method_args:
        return module
    return CalledModel(module, partial(method, **spec.method_args))


def method_of(module: torch.nn.Module, spec: ModelSpec) -> Callable[..., Any]:
    """Return what is called instead of forward; raises ModelError when there is no such method."""
    try:
        found = module.forward if spec.method == "forward" else attrgetter(spec.method)(module)
    except AttributeError as error:
        raise ModelError(
            f"model {spec.key}: {spec.config_file}: model.method: '{type(module).__name__}' has no"
            f" method '{spec.method}'"
        ) from error
    if not callable(found):
        raise ModelError(
            f"model {spec.key}: {spec.config_file}: model.method: '{spec.method}' of"
            f" '{type(module).__name__}' is a {type(found).__name__}, which cannot be called"
        )
    result: Callable[..., Any] = found
    return result


def required_parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of forward, or of another, that have no default.

    Returns none where Python cannot tell them.
    """
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(p.name for p in parameters if p.kind in positional and p.default is p.empty)


def takes_data(method: Callable[..., Any], names: Sequence[str]) -> bool:
    """Return True when the only required parameter of `method` is a graph of PyG.

    It is when it is annotated so, when it is called `data`, or when it is called `batch`, is the
    only one and more than one tensor is given. `names` are those of the arguments.
    """
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return False
    required = [
        one
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if len(required) != 1:
        return False
    (only,) = required
    if only.name == "batch" and len(parameters) == 1 and len(names) > 1:
        return True
    annotated = any(kind in str(only.annotation) for kind in ("Data", "Batch"))
    return only.name not in names and (only.name == "data" or annotated)


def _with_data(
    method: Callable[..., Any], names: Sequence[str], given: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return `method` with a parameter for each name instead of one graph."""

    def call(*values: Any) -> Any:
        return method(_graph(dict(zip(names, values, strict=True))), **given)

    return call


def _graph(arguments: Mapping[str, Any]) -> Data | HeteroData:
    """Return a graph with these attributes; those of several types are dicts by type."""
    if not any(isinstance(value, dict) for value in arguments.values()):
        return Data(**{name: value for name, value in arguments.items() if value is not None})
    graph = HeteroData()
    for name, value in arguments.items():
        if isinstance(value, dict):
            for kind, tensor in value.items():
                graph[kind][name] = tensor
        elif value is not None:
            graph[name] = value
    return graph
