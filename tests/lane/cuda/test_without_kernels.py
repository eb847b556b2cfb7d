"""CUDA's calls without our kernels: through a runtime that the process has loaded."""

import subprocess
import sys

import pytest
import torch

from serve.native_cuda import CudaError, CudaLibrary

#: A runtime whose functions all succeed, but the one that takes memory.
RUNTIME = """
const char* cudaGetErrorString(int code) { return "no memory is left"; }
int cudaMalloc(void** memory, unsigned long bytes) {
    *memory = bytes == 4096 ? (void*)0x1000 : 0;
    return bytes == 4096 ? 0 : 2;
}
int cudaHostGetDevicePointer(void** seen, void* memory, unsigned flags) {
    *seen = (char*)memory + 0x100;
    return 0;
}
"""
PLAIN = (
    "cudaGetLastError", "cudaSetDevice", "cudaHostRegister", "cudaHostUnregister",
    "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaStreamWaitEvent",
    "cudaGraphInstantiate", "cudaGraphDestroy", "cudaGraphLaunch", "cudaGraphExecDestroy",
    "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize",
    "cudaMemcpyAsync", "cudaMemsetAsync",
)  # fmt: skip
PROGRAM = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from serve.native_cuda import CudaError, CudaLibrary
library = CudaLibrary(kernels=False)
print(hex(library.slab(0, 4096)), hex(library.register(0x2000, 1)), library.replay_task != 0)
library.unregister(0x2000)
for call in (lambda: library.slab(0, 1 << 40), lambda: library.partition(0, 8)):
    try:
        call()
    except CudaError as error:
        print(error)
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA runtime")
def test_a_torch_without_cuda_is_named_as_the_reason():
    with pytest.raises(
        CudaError, match=r"torch has loaded no CUDA runtime: cuda[A-Z].* is missing"
    ):
        CudaLibrary(kernels=False)


def test_the_runtime_of_the_process_is_called(tmp_path):
    source, runtime = tmp_path / "runtime.c", tmp_path / "libruntime.so"
    source.write_text(RUNTIME + "".join(f"int {name}() {{ return 0; }}\n" for name in PLAIN))
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", runtime], check=True)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, runtime], check=True, capture_output=True, text=True
    )
    assert found.stdout.splitlines() == [
        "0x1000 0x2100 True",
        "cudaMalloc of 1099511627776 bytes on device 0: no memory is left (cudaError 2)",
        "that takes libgnnserve_cuda.so",
    ]
