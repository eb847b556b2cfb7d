"""A model in a lane's memory, ready to run.

Weights are memory-mapped and assigned, not copied, so lanes that load the same file, or the
server's own copy of it, share its pages. Nothing is ever unpickled; the only code run is the
factory the repository names.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.parameter import is_lazy

from serve.errors import InvalidInput, ModelError
from serve.inputs import COUNTED_BY, INPUTS
from serve.lane.models.calling import called
from serve.lane.models.declared import DeclaredForward, Sizes
from serve.models.repository import ModelSpec
from serve.models.weights_file import check_weights

_OTHER_FLOATS = torch.float64, torch.float16, torch.bfloat16
_FLOAT32 = "; weights are served as float32, so the factory must build the model in that"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A PyG module in eval mode with its weights mapped."""

    spec: ModelSpec
    module: torch.nn.Module
    #: Name of its executor; see ``serve.lane.executors``.
    executor: str = field(default="eager", kw_only=True)
    #: Called when a run has ended, also by an error.
    after_run: Callable[[], None] | None = field(default=None, kw_only=True)
    #: Runs a model that declares its inputs and outputs; None for the short form.
    declared: DeclaredForward | None = field(default=None, kw_only=True)

    def outputs(
        self, inputs: Mapping[str, torch.Tensor], sizes: Sizes | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Run one forward pass without autograd; returns all outputs, contiguous.

        `inputs` are those that the model declares, or those of ``run``. `sizes` are what
        ``DeclaredForward.sizes`` returns of them, where that is known. Raises what ``run`` raises,
        and ModelError when the outputs are not as declared.
        """
        if self.declared is None:
            return (self.run(inputs),)
        try:
            with torch.inference_mode():
                return self.declared(self.module, inputs, sizes)
        finally:
            if self.after_run is not None:
                self.after_run()

    def run(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run one forward pass without autograd; returns float32 [rows, C], contiguous.

        `inputs` holds by name x float32 [N, F], edge_index int64 [2, E], edge_weight float32 [E],
        edge_attr float32 [E, D] and batch int64 [N]. Inputs that the model does not take are
        ignored. A missing edge_weight means ones, a missing batch means one graph.

        Raises InvalidInput when another input is missing, and ModelError when forward returns
        anything but a float32 vector or matrix. Errors of forward itself pass through, so that the
        caller can tell running out of memory from a bug in the model.
        """
        try:
            with torch.inference_mode():
                output = self.module(*(self._argument(name, inputs) for name in self.spec.inputs))
                return self.checked(output)
        finally:
            if self.after_run is not None:
                self.after_run()

    def checked(self, output: object) -> torch.Tensor:
        """Return `output` as float32 [rows, C], contiguous; a vector becomes one column.

        Raises ModelError naming the type, layout, dtype or shape of any other output.
        """
        if not isinstance(output, torch.Tensor):
            raise ModelError(self._wrong_output(f"a {type(output).__name__}"))
        if output.layout != torch.strided:
            raise ModelError(self._wrong_output(f"a tensor that is not dense ({output.layout})"))
        if output.dtype != torch.float32 or output.dim() not in (1, 2):
            raise ModelError(self._wrong_output(f"{output.dtype} {list(output.shape)}"))
        return (output if output.dim() == 2 else output.unsqueeze(1)).contiguous()

    def _argument(self, name: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        value = inputs.get(name)
        if value is not None:
            return value
        if INPUTS[name].optional:
            return default_input(name, inputs)
        raise InvalidInput(f"model '{self.spec.name}' needs the tensor '{name}'")

    def _wrong_output(self, what: str) -> str:
        return f"model {self.spec.key}: forward returned {what}; it must be torch.float32 [rows, C]"


def default_input(name: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the default of an optional input that a request left out."""
    wanted = INPUTS[name]
    per, _ = wanted.per
    counted, axis = COUNTED_BY[per]
    shape = wanted.shape_of({per: inputs[counted].shape[axis]})
    x = inputs["x"]
    assert wanted.default is not None
    return x.new_full(shape, wanted.default, dtype=getattr(torch, wanted.dtype))


def load_model(spec: ModelSpec) -> LoadedModel:
    """Build the model and map its weights.

    Raises ModelError naming the step that failed, and ConfigError when the weights file has changed
    since the repository was read.
    """
    module = build_model(spec)
    where = f"model {spec.key}: {spec.config_file}"
    for name, layer in module.named_modules():
        # A cached layer answers every later graph with the first one's normalised edges.
        if getattr(layer, "cached", False) is True:
            raise ModelError(
                f"{where}: layer '{name}' ({type(layer).__name__}) has cached=True, which keeps"
                " one graph's edges for the next request; build it with cached=False"
            )
    _map_weights(module, spec)
    # Some classes of PyG return nothing from eval.
    module.eval()
    module.requires_grad_(False)
    module = called(module, spec)
    declared = None
    if spec.interface is not None:
        declared = DeclaredForward(module, spec.interface, spec.key)
    return LoadedModel(spec=spec, module=module, declared=declared)


def build_model(spec: ModelSpec) -> torch.nn.Module:
    """Return what the factory makes, without weights; raises ModelError naming the step."""
    where = f"model {spec.key}: {spec.config_file}"
    factory = _resolve(spec)
    try:
        module = factory(**spec.args)
    except Exception as error:
        raise ModelError(
            f"{where}: model.args: {spec.factory} with {spec.args}: {_told(error)}"
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"{where}: model.factory: {spec.factory} returned a {type(module).__name__},"
            " not a torch.nn.Module"
        )
    return module


def _map_weights(module: torch.nn.Module, spec: ModelSpec) -> None:
    """Assign the file's tensors, still mapped, to the module's parameters and buffers."""
    where = f"model {spec.key}: {spec.weights}"
    check_weights(spec.weights_file, told_as=Path(spec.weights))
    state = load_file(spec.weights_file)
    for names in tied_names(module):
        # A file holds tensors that are one in the model once, as `safetensors.torch.save_model`
        # writes it, or under each name.
        held = next((state[name] for name in names if name in state), None)
        if held is not None:
            state |= {name: held for name in names if name not in state}
    for name, wanted in module.state_dict().items():
        given = state.get(name)
        # A lazy parameter takes whatever shape the file has.
        if given is None or is_lazy(wanted):
            continue
        if (given.dtype, given.shape) != (wanted.dtype, wanted.shape):
            raise ModelError(
                f"{where}: tensor '{name}' is {given.dtype} {list(given.shape)},"
                f" the model has {wanted.dtype} {list(wanted.shape)}"
                f"{_FLOAT32 if wanted.dtype in _OTHER_FLOATS else ''}"
            )
    missing, unexpected = module.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        parts = [
            f"{verb} {', '.join(sorted(names)[:8])}{', …' if len(names) > 8 else ''}"
            for verb, names in (("lacks", missing), ("has the unknown", unexpected))
            if names
        ]
        raise ModelError(f"{where}: {' and '.join(parts)}")


def tied_names(module: torch.nn.Module) -> list[list[str]]:
    """Return the names in the module's state of each tensor that has several."""
    by_place: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in module.state_dict().items():
        if not is_lazy(tensor) and tensor.numel():
            # A transpose has other strides.
            place = tensor.data_ptr(), tensor.shape, tensor.stride()
            by_place.setdefault(place, []).append(name)
    return [names for names in by_place.values() if len(names) > 1]


def _resolve(spec: ModelSpec) -> Callable[..., Any]:
    """Import the factory's module, or the file beside config.toml, and take the callable."""
    target, _, attribute = spec.factory.rpartition(":")
    where = f"model {spec.key}: {spec.config_file}: model.factory {spec.factory!r}"
    source = spec.source_file
    try:
        loaded = importlib.import_module(target) if source is None else _load_file(spec, source)
    except Exception as error:
        raise ModelError(f"{where}: {_told(error)}") from error
    factory = getattr(loaded, attribute, None)
    if not callable(factory):
        raise ModelError(f"{where}: {target} has no callable '{attribute}'")
    result: Callable[..., Any] = factory
    return result


def _load_file(spec: ModelSpec, path: Path) -> ModuleType:
    """Run a model's own file as a module of its own, once more on every load."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"gnnserve_model_{digest}_{spec.version}"
    loader = _SourceLoader(name, str(path), spec.copied_source or str(path))
    module_spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert module_spec is not None
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and torch.export look their module up by name.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _SourceLoader(SourceFileLoader):
    """A loader that runs the source of one file as the module at another path.

    It ignores cached byte code. Python matches byte code to a file by size and time in seconds,
    which is too coarse for a file that was just replaced.
    """

    def __init__(self, name: str, path: str, read_from: str) -> None:
        super().__init__(name, path)
        self._read_from = read_from

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Say that there is no file to keep byte code of."""
        raise OSError(f"{path}: byte code is not kept")

    def get_data(self, path: str) -> bytes:
        """Return the source."""
        return Path(self._read_from).read_bytes()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
