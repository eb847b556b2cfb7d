"""The two compiled libraries for devices, through ctypes.

``libgnnserve_device`` places device memory and is always built with ``serve._core``;
``libgnnserve_cuda`` has the kernels and is built where nvcc is (see csrc/cuda/cuda.cmake). Either
talks to CUDA, the first through the runtime that torch has loaded. Both lie beside ``serve._core``,
or in the folder of this package in a checkout that was not installed.
"""

import ctypes
import importlib.util
from array import array
from pathlib import Path
from typing import TypeAlias

DEVICE_LIBRARY = "libgnnserve_device.so"
CUDA_LIBRARY = "libgnnserve_cuda.so"

#: Of each copy, where it goes, where it comes from, and its bytes; of type "Q".
CopyList: TypeAlias = "array[int]"

#: Threads of a gather where ``serve.lane.cuda.gather_threads`` has measured none. Each has 16 bytes
#: in flight, 256 KiB in all: about twice the amount that keeps the bus busy. The rest of the device
#: stays free for other lanes.
GATHER_THREADS = 1 << 14


class CudaError(RuntimeError):
    """An error of CUDA, with CUDA's own text."""


def library_path(name: str) -> Path | None:
    """Return the path of the library; None when it was not built."""
    folders = [Path(__file__).resolve().parent]
    extension = importlib.util.find_spec("serve._core")
    if extension is not None and extension.origin is not None:
        folders.insert(0, Path(extension.origin).parent)
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def required_path(name: str) -> Path:
    """Return ``library_path``; raises FileNotFoundError that says how to build it."""
    path = library_path(name)
    if path is None:
        raise FileNotFoundError(f"{name} was not built; see docs/cuda.md")
    return path


class CudaLibrary:
    """CUDA, with our kernels or without. Every call raises CudaError with CUDA's own words."""

    def __init__(self, *, kernels: bool = True) -> None:
        """Load ``libgnnserve_cuda``, or without `kernels` what needs none, once torch is imported.

        Raises CudaError when torch has no CUDA runtime.
        """
        # Not PyDLL: what waits for the device must not hold the interpreter lock.
        library = ctypes.CDLL(str(required_path(CUDA_LIBRARY if kernels else DEVICE_LIBRARY)))
        if not kernels:
            library.gnnserve_cuda_open.restype = ctypes.c_char_p
            if missing := library.gnnserve_cuda_open():
                raise CudaError(f"torch has loaded no CUDA runtime: {missing.decode()} is missing")
        self._error = library.gnnserve_cuda_error
        self._error.restype, self._error.argtypes = ctypes.c_char_p, [ctypes.c_int]
        pointer, size, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        address = ctypes.POINTER(ctypes.c_uint64)
        self._slab = library.gnnserve_cuda_slab
        self._slab.argtypes = [code, size, address]
        self._register = library.gnnserve_cuda_register
        self._register.argtypes = [code, pointer, size, address]
        self._unregister = library.gnnserve_cuda_unregister
        self._unregister.argtypes = [pointer]
        self._capture = library.gnnserve_cuda_capture
        self._capture.argtypes = [pointer]
        self._end_capture = library.gnnserve_cuda_capture_end
        self._end_capture.argtypes = [pointer, address]
        self._replay = library.gnnserve_cuda_replay
        self._replay.argtypes = [pointer, pointer]
        self._forget = library.gnnserve_cuda_forget
        self._forget.argtypes = [pointer]
        self._route = library.gnnserve_cuda_route
        self._route.argtypes = [code, pointer, pointer, address]
        self._upload = library.gnnserve_cuda_upload
        self._upload.argtypes = [pointer, pointer, code, pointer, size]
        self._download = library.gnnserve_cuda_download
        self._download.argtypes = [pointer, pointer, pointer, size]
        #: Address of what does all of a captured run's task, for ``lane.cuda.replayer.Replayer``.
        self.replay_task = ctypes.cast(library.gnnserve_cuda_replay_task, pointer).value or 0
        self._finish = library.gnnserve_cuda_finish
        self._finish.argtypes = [pointer, pointer]
        self.has_kernels = kernels
        if not kernels:
            return
        number = ctypes.POINTER(ctypes.c_int)
        self._partition = library.gnnserve_cuda_partition
        self._partition.argtypes = [code, code, address, number, number]
        self._partition_stream = library.gnnserve_cuda_partition_stream
        self._partition_stream.argtypes = [ctypes.c_uint64, address]
        self._gather = library.gnnserve_cuda_gather
        self._gather.argtypes = [
            pointer, pointer, size, size, pointer, pointer, pointer, code, size, pointer,
        ]  # fmt: skip

    def slab(self, device: int, size_bytes: int) -> int:
        """Allocate memory of the device until the process ends; returns its address."""
        address = ctypes.c_uint64()
        self._check(
            self._slab(device, size_bytes, ctypes.byref(address)),
            f"cudaMalloc of {size_bytes} bytes on device {device}",
        )
        return address.value

    def register(self, host_address: int, size_bytes: int, device: int = 0) -> int:
        """Pin host memory in place; returns the device's address of it.

        The device becomes the thread's current one.
        """
        address = ctypes.c_uint64()
        self._check(
            self._register(device, host_address, size_bytes, ctypes.byref(address)),
            f"cudaHostRegister of {size_bytes} bytes",
        )
        return address.value

    def unregister(self, host_address: int) -> None:
        """Undo ``register``, before the memory is unmapped."""
        self._check(self._unregister(host_address), "cudaHostUnregister")

    def capture(self, stream: int) -> None:
        """Record this thread's launches on the stream until ``end_capture``."""
        self._check(self._capture(stream), "cudaStreamBeginCapture")

    def end_capture(self, stream: int) -> int:
        """Return the recorded launches for ``replay``; they use the memory of the capture."""
        replay = ctypes.c_uint64()
        self._check(self._end_capture(stream, ctypes.byref(replay)), "cudaStreamEndCapture")
        return replay.value

    def replay(self, replay: int, stream: int) -> None:
        """Launch all recorded work."""
        self._check(self._replay(replay, stream), "cudaGraphLaunch")

    def forget(self, replay: int) -> None:
        """Free the result of ``end_capture``."""
        self._check(self._forget(replay), "cudaGraphExecDestroy")

    def route(self, device: int, up: int, down: int) -> int:
        """Return a lane's way to the device and back, over these two streams for copies."""
        made = ctypes.c_uint64()
        self._check(self._route(device, up, down, ctypes.byref(made)), "cudaEventCreate")
        return made.value

    def upload(self, route: int, stream: int, copies: CopyList, *, behind: bool) -> None:
        """Start copies to the device; what is launched on the stream afterwards waits for them.

        With `behind`, they wait for what was launched on it before.
        """
        self._check(
            self._upload(route, stream, behind, copies.buffer_info()[0], len(copies) // 3),
            "cudaMemcpyAsync to the device",
        )

    def download(self, route: int, stream: int, copies: CopyList) -> None:
        """Copy to the host what is computed on the stream; returns when all of it is there."""
        self._check(
            self._download(route, stream, copies.buffer_info()[0], len(copies) // 3),
            "cudaMemcpyAsync from the device",
        )

    def finish(self, route: int, stream: int) -> None:
        """Wait for everything on the stream and on those of the route."""
        self._check(self._finish(route, stream), "cudaEventSynchronize")

    def partition(self, device: int, reserved_sms: int) -> tuple[int, int, int]:
        """See ``lane.cuda.partition.PartitionCalls``."""
        if not self.has_kernels:
            raise CudaError(f"that takes {CUDA_LIBRARY}")
        context, kept, whole = ctypes.c_uint64(), ctypes.c_int(), ctypes.c_int()
        self._check(
            self._partition(
                device, reserved_sms, ctypes.byref(context), ctypes.byref(kept), ctypes.byref(whole)
            ),
            f"a green context without {reserved_sms} multiprocessors of device {device}",
        )
        return context.value, kept.value, whole.value

    def partition_stream(self, context: int) -> int:
        """See ``lane.cuda.partition.PartitionCalls``."""
        stream = ctypes.c_uint64()
        self._check(
            self._partition_stream(context, ctypes.byref(stream)), "a stream of a green context"
        )
        return stream.value

    def gather(
        self,
        table: int,
        ids: int,
        num_rows: int,
        row_bytes: int,
        out: int,
        *,
        stream: int,
        hot: int = 0,
        slot_of: int = 0,
        shift: bool = True,
        most_threads: int = GATHER_THREADS,
    ) -> None:
        """Launch out[i] = table[ids[i]]; all addresses are the device's, see cuda/gather.cuh."""
        self._check(
            self._gather(
                table, ids, num_rows, row_bytes, hot, slot_of, out, shift, most_threads, stream
            ),
            f"gather of {num_rows} rows of {row_bytes} bytes",
        )

    def _check(self, code: int, what: str) -> None:
        if code:
            raise CudaError(f"{what}: {self._error(code).decode()} (cudaError {code})")
