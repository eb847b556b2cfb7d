"""A fused kernel: one pass over a graph's edges for the features of several tasks.

`aggregate_many.cpp` is compiled here, with the options of the server's kernels. Serving has no use
for it (``bench.papers.fused_pass`` tells why).
"""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bench.kit.result import ROOT
from serve.lane.executors.kernels import Csr

#: How tasks share the edges: a piece of rows that lies in the nearest cache, task after task; or
#: each edge that is read, two or four tasks at once.
Layout = Literal["by_rows", "in_pairs", "in_fours"]
LAYOUTS: dict[Layout, int] = {"by_rows": 0, "in_pairs": 2, "in_fours": 4}
_SOURCE = Path(__file__).with_suffix(".cpp")
_CSRC = ROOT / "csrc"
#: What each instruction set needs, by /proc/cpuinfo; options as in csrc/CMakeLists.txt.
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi2", "fma", "f16c", "movbe"},
}


def aggregate_many(
    graph: Csr,
    features: Sequence[Tensor],
    layout: Layout,
    weights: Sequence[Tensor] | None = None,
    *,
    mean: bool = False,
) -> list[Tensor]:
    """Return what ``kernels.aggregate`` gives for each of `features`, to the bit.

    `features` are float32 [N, F], contiguous, of one width of 4 to 4096, at most 16; `weights` are
    by slot, one tensor for each. Raises ValueError for others.
    """
    width = features[0].shape[1]
    for tensor in features:
        if tensor.shape != (graph.rows, width) or tensor.dtype != torch.float32:
            raise ValueError(f"features must be float32 {[graph.rows, width]}, not {tensor.shape}")
        if not tensor.is_contiguous():
            raise ValueError("features must be contiguous")
    out = [torch.empty_like(tensor) for tensor in features]
    begin = graph.tensor.data_ptr()
    done = _library().aggregate_many(
        begin, begin + 4 * (graph.rows + 1), graph.rows, len(features), _addresses(features),
        None if weights is None else _addresses(weights), width, mean, LAYOUTS[layout],
        _addresses(out),
    )  # fmt: skip
    if not done:
        raise ValueError(f"{len(features)} tasks of width {width}: at most 16, of 4 to 4096")
    return out


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@cache
def _library() -> ctypes.CDLL:
    """Return the compiled kernel; raises CalledProcessError, or OSError without a compiler."""
    options = ["-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-ffp-contract=fast",
               "-fno-exceptions", *_instructions(), f"-I{_CSRC / 'include'}",
               f"-I{_CSRC / 'src'}"]  # fmt: skip
    digest = hashlib.sha256("".join(options).encode())
    for source in (_SOURCE, _CSRC / "src" / "rows_isa.hpp"):
        digest.update(source.read_bytes())
    path = ROOT / "build" / f"aggregate_many-{digest.hexdigest()[:12]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        command = ["c++", *options, str(_SOURCE), "-o", str(draft)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        draft.rename(path)
    library = ctypes.CDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.aggregate_many.argtypes = [
        pointer, pointer, integer, integer, pointer, pointer, integer, ctypes.c_bool, integer,
        pointer,
    ]  # fmt: skip
    library.aggregate_many.restype = ctypes.c_bool
    return library


def _instructions() -> list[str]:
    """Return the compiler's options for what the server's kernels take on this processor."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    for level, needed in _LEVELS.items():
        if needed <= set(flags.split()):
            return [f"-march={level}", *(["-mprefer-vector-width=512"] if "v4" in level else [])]
    return []
