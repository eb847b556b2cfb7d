"""The kernels along edges on a GPU: ``torch.ops.gnnserve`` for tensors of CUDA.

csrc/torch/device_operators.cpp has the operators, so that a launch takes no Python; they call the
functions of csrc/cuda/graph_api.cuh in libgnnserve_cuda.
"""

from typing import Any

import torch

from serve import native
from serve.lane.executors import kernels
from serve.native_cuda import CUDA_LIBRARY, required_path

#: Operators that devices have.
OPERATORS = ("csr", "spread", "normalise", "aggregate", "attend", "head_dots")
_SIMULATED = "gnnserve_simulated"


def use_graph_kernels() -> None:
    """Let the operators take tensors of CUDA.

    Raises FileNotFoundError when CUDA was not built, RuntimeError when torch does not take them.
    """
    native.use_device_operators(str(required_path(CUDA_LIBRARY)))
    kernels.devices.add("cuda")


def graph_kernels() -> dict[str, Any]:
    """Return the operators by name, as they are called directly."""
    return {name: getattr(torch.ops.gnnserve, name).default for name in OPERATORS}


def simulated_kernels(path: str) -> dict[str, Any]:
    """Return operators that run on the processor what a GPU would run, by a library for tests."""
    native.define_simulated_operators(path, _SIMULATED)
    return {name: getattr(getattr(torch.ops, _SIMULATED), name).default for name in OPERATORS}
