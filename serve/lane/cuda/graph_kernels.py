"""The kernels along a graph's edges on the device, as implementations of ``torch.ops.gnnserve``.

The functions have the signatures of the operators in csrc/torch/operators.cpp and call the C
functions of csrc/cuda/graph_api.cuh. All memory comes from torch, all work goes to the current
stream, and nothing waits for the device. Graphs must have been checked: an edge to a node that does
not exist ends the process's use of the device, as in torch's own kernels.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from serve.native_cuda import CUDA_LIBRARY, CudaError, required_path

#: See csrc/cuda/aggregate.cuh.
_CHUNK_SLOTS, _PIECES = 1024, 2
_ADDITIVE, _DYNAMIC = 0, 1
_MOST_SLOTS = 2**31 - 1

_ADDRESS, _SIZE, _FLAG, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "csr": (*[_ADDRESS] * 2, _FLAG, _SIZE, _SIZE, _FLAG, *[_ADDRESS] * 5),
    "spread": (_ADDRESS, _SIZE, _ADDRESS, _REAL, _ADDRESS, _ADDRESS),
    "normalise": (_ADDRESS, _ADDRESS, _SIZE, *[_ADDRESS] * 4),
    "aggregate": (
        _ADDRESS, _ADDRESS, _SIZE, _SIZE, *[_ADDRESS] * 3, _SIZE, _FLAG, _ADDRESS, _REAL,
        _ADDRESS, _FLAG, _ADDRESS, _ADDRESS,
    ),
    "attend": (
        _ADDRESS, _ADDRESS, _SIZE, _SIZE, _ADDRESS, _FLAG, *[_ADDRESS] * 4, _FLAG, _ADDRESS, _REAL,
        _ADDRESS, _SIZE, _SIZE, _FLAG, *[_ADDRESS] * 4,
    ),
    "head_dots": (_ADDRESS, _ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS),
}  # fmt: skip


def _current_stream(device: torch.device) -> int:
    # Called at every launch, and several times as fast as torch.cuda.current_stream.
    handle: int = torch._C._cuda_getCurrentRawStream(device.index or 0)
    return handle


class GraphKernels:
    """Implementations of the operators, under the operators' names."""

    def __init__(
        self,
        path: str | None = None,
        stream: Callable[[torch.device], int] = _current_stream,
    ) -> None:
        """Load the library; raises FileNotFoundError when CUDA was not built.

        `path` and `stream` are for tests.
        """
        # Not PyDLL: a launch waits when the queue of the device is full.
        self._library = ctypes.CDLL(path or str(required_path(CUDA_LIBRARY)))
        self._stream = stream
        self._calls: dict[str, Any] = {}
        for name, parameters in _PARAMETERS.items():
            function = getattr(self._library, f"gnnserve_graph_{name}")
            function.argtypes = parameters
            self._calls[name] = function
        self._scratch_bytes = self._library.gnnserve_graph_csr_scratch
        self._scratch_bytes.restype, self._scratch_bytes.argtypes = _SIZE, [_SIZE]

    def implementations(self) -> dict[str, Callable[..., Tensor]]:
        """Return the implementation of each operator."""
        return {name: getattr(self, name) for name in _PARAMETERS}

    def csr(self, edge_index: Tensor, rows: int, replace_loops: bool, edges: bool) -> Tensor:
        """Return int32 [rows + 1 + room (+ room)]; slots after the last node's are unused."""
        count = edge_index.shape[1]
        room = count + (rows if replace_loops else 0)
        _require(
            edge_index.dtype in (torch.int64, torch.int32), "edge_index must be int64 or int32"
        )
        _require(edge_index.shape[0] == 2, "edge_index must be [2, E]")
        _require(count < 2 or edge_index.stride(1) == 1, "edge_index must have contiguous rows")
        _require(room <= _MOST_SLOTS, f"at most {_MOST_SLOTS} edges can be sorted")
        device = edge_index.device
        made = torch.empty(rows + 1 + room * (1 + edges), dtype=torch.int32, device=device)
        scratch = torch.empty(self._scratch_bytes(count), dtype=torch.uint8, device=device)
        begin, first = made.data_ptr(), edge_index.data_ptr()
        source = begin + 4 * (rows + 1)
        self._call(
            "csr", device, first, first + edge_index.stride(0) * edge_index.element_size(),
            edge_index.dtype == torch.int32, count, rows, replace_loops, begin, source,
            source + 4 * room if edges else 0, scratch.data_ptr(),
        )  # fmt: skip
        return made

    def spread(self, graph: Tensor, rows: int, value: Tensor, missing: float) -> Tensor:
        """Return `value` [E] by slot, float32 [room]."""
        room = (graph.numel() - rows - 1) // 2
        values = _floats(value, value.numel(), "value")
        out = torch.empty(room, dtype=torch.float32, device=graph.device)
        edge = graph.data_ptr() + 4 * (rows + 1 + room)
        self._call("spread", graph.device, edge, room, values, missing, out.data_ptr())
        return out

    def normalise(self, graph: Tensor, rows: int, edges: bool, weight: Tensor | None) -> Tensor:
        """Return a graph convolution's weights by slot, float32 [room]."""
        room = (graph.numel() - rows - 1) // (1 + edges)
        out = torch.empty(room, dtype=torch.float32, device=graph.device)
        scratch = torch.empty(rows, dtype=torch.float32, device=graph.device)
        begin = graph.data_ptr()
        self._call(
            "normalise", graph.device, begin, begin + 4 * (rows + 1), rows,
            _floats(weight, room, "weight"), out.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        return out

    def aggregate(
        self, graph: Tensor, x: Tensor, weight: Tensor | None, reduce: int, skip: Tensor | None,
        skip_scale: float, bias: Tensor | None, relu: bool,
    ) -> Tensor:  # fmt: skip
        """Return float32 [N, F]."""
        rows, width = x.shape
        # With the edges of slots it may be half of this: they are not told apart here.
        slots = graph.numel() - rows - 1
        out = torch.empty_like(x)
        partial = self._partial(graph, slots, width)
        begin = graph.data_ptr()
        self._call(
            "aggregate", graph.device, begin, begin + 4 * (rows + 1), rows, slots,
            partial.data_ptr(), _floats(x, rows * width, "x"),
            0 if weight is None else _floats(weight, weight.numel(), "weight"), width, reduce,
            _floats(skip, rows * width, "skip"), skip_scale, _floats(bias, width, "bias"), relu,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def attend(
        self, graph: Tensor, edges: bool, added_loops: bool, score: int, left: Tensor,
        right: Tensor, value: Tensor, heads: int, scale: float, average: bool, att: Tensor | None,
        edge: Tensor | None, skip: Tensor | None, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return float32 [N, heads · C], or [N, C] when heads are averaged."""
        rows, width = value.shape
        slots = (graph.numel() - rows - 1) // (1 + edges)
        channels = width // heads
        out_width = channels if average else width
        scored = rows * (heads if score == _ADDITIVE else width)
        _require(score != _DYNAMIC or att is not None, "a dynamic score needs att")
        _require(edge is None or edges, "edge needs a graph that remembers its edges")
        out = torch.empty(rows, out_width, dtype=torch.float32, device=value.device)
        partial = self._partial(graph, slots, heads * (channels + 2))
        begin = graph.data_ptr()
        source = begin + 4 * (rows + 1)
        self._call(
            "attend", graph.device, begin, source, rows, slots, partial.data_ptr(), score,
            _floats(left, scored, "left"), _floats(right, scored, "right"),
            0 if edge is None else _floats(edge, edge.numel(), "edge"),
            source + 4 * slots if edges else 0, added_loops, _floats(att, width, "att"), scale,
            _floats(value, rows * width, "value"), heads, channels, average,
            _floats(skip, rows * out_width, "skip"), _floats(bias, out_width, "bias"),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def head_dots(self, x: Tensor, att: Tensor, heads: int) -> Tensor:
        """Return Σ_c x[i, h, c] · att[h, c], float32 [N, heads]."""
        rows, width = x.shape
        out = torch.empty(rows, heads, dtype=torch.float32, device=x.device)
        self._call(
            "head_dots", x.device, _floats(x, rows * width, "x"), _floats(att, width, "att"), rows,
            heads, width // heads, out.data_ptr(),
        )  # fmt: skip
        return out

    def _partial(self, graph: Tensor, slots: int, width: int) -> Tensor:
        """Room for `width` floats of every piece that heavy nodes are put together of.

        Also where no node is heavy, and in whole bytes a slot: memory estimates are linear.
        """
        piece_bytes = 4 * _PIECES * width
        size_bytes = slots * -(-piece_bytes // _CHUNK_SLOTS) + piece_bytes
        return torch.empty(size_bytes, dtype=torch.uint8, device=graph.device)

    def _call(self, name: str, device: torch.device, *arguments: Any) -> None:
        code = self._calls[name](*arguments, self._stream(device))
        if code:
            raise CudaError(f"gnnserve::{name} could not be launched (cudaError {code})")


def _floats(tensor: Tensor | None, count: int, name: str) -> int:
    """Return the address of a float32 tensor of `count` elements; 0 for None."""
    if tensor is None:
        return 0
    if tensor.dtype != torch.float32 or tensor.numel() != count or not tensor.is_contiguous():
        raise ValueError(f"{name} must be float32 and contiguous, of {count} elements")
    return tensor.data_ptr()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
