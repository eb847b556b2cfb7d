"""The executors `compiled` and `csr_compiled`: a forward pass as machine code of its own.

The model, as PyG wrote it or over our operators, compiled ahead of time (`compiling`) to a package
for any numbers of nodes and edges: a folder with a shared library, made once and mapped by every
lane. Weights are not in it: it borrows those that the lane has mapped.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from serve.lane.executors.csr import CannotRun, with_csr
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature

#: Model to compile for each executor of ``PACKAGED``: as loaded, or over our operators.
BENEATH: dict[str, Callable[[LoadedModel], LoadedModel]] = {
    "compiled": lambda loaded: loaded,
    "csr_compiled": with_csr,
}
#: Smallest size for which a package is valid: export treats 0 and 1 as constants.
LEAST = 2
#: File of the tensors that a package needs besides the model's weights.
CONSTANTS = "constants.safetensors"

_DTYPES = {"x": torch.float32, "edge_index": torch.int64, "edge_weight": torch.float32,
           "edge_attr": torch.float32, "batch": torch.int64}  # fmt: skip


def with_package(loaded: LoadedModel, signature: Signature, name: str, package: str) -> LoadedModel:
    """Return `loaded` run by the package compiled for it; raises CannotRun without one."""
    loaded = BENEATH[name](loaded)
    forward = _Packaged(loaded, signature, Path(package))
    loaded.module.forward = forward
    return replace(loaded, executor=name)


class _Packaged:
    """A module's forward: the package where it is valid, the previous forward elsewhere."""

    def __init__(self, loaded: LoadedModel, signature: Signature, package: Path) -> None:
        self._before = loaded.module.forward
        names = loaded.spec.inputs
        self._x, self._edges = names.index("x"), names.index("edge_index")
        columns = {"x": signature.num_features, "edge_attr": signature.edge_dim}
        self._expected = [(_DTYPES[name], name, columns.get(name)) for name in names]
        found = [path.parent for path in package.glob("**/data") if path.is_dir()]
        if len(found) != 1:
            raise CannotRun(f"{package} is not a compiled model")
        # Given a folder, the loader maps the library in it, so that lanes share its pages.
        loader: Any = torch._C._aoti.AOTIModelPackageLoader
        try:
            self._package = loader(str(found[0]), "model", True, 1, -1)
            own = weights_of(loaded.module) | load_file(package / CONSTANTS)
            # Kept: the package borrows them.
            self._weights = {name: own[name] for name in self._package.get_constant_fqns()}
            self._package.load_constants(self._weights, False, True, True)
        except (OSError, RuntimeError, KeyError, TypeError) as error:
            raise CannotRun(f"{package} does not load: {type(error).__name__}: {error}") from error

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the model's output for its inputs, in the order of its forward."""
        if self._covers(inputs):
            return self._package.boxed_run(list(inputs))[0]
        return self._before(*inputs)

    def _covers(self, inputs: tuple[Tensor, ...]) -> bool:
        """Return True when the inputs match those of the export, except for nodes and edges.

        Called before every run, as the compiled code does not check its inputs.
        """
        nodes, edges = inputs[self._x].shape[0], inputs[self._edges].shape[-1]
        if nodes < LEAST or edges < LEAST or len(inputs) != len(self._expected):
            return False
        for value, (dtype, name, columns) in zip(inputs, self._expected, strict=True):
            if name == "edge_index":
                shape: tuple[int, ...] = (2, edges)
            else:
                rows = nodes if name in ("x", "batch") else edges
                shape = (rows,) if columns is None else (rows, columns)
            if value.dtype is not dtype or value.shape != shape or not value.is_contiguous():
                return False
        return True


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )
