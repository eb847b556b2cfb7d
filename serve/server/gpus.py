"""Detection of GPUs, in a process of its own.

A process that calls CUDA gets a context: hundreds of megabytes of device memory for as long as it
lives. The main process must not have one.
"""

import json
import logging
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module, util
from pathlib import Path
from typing import Any

from serve.native_cuda import CUDA_LIBRARY, DEVICE_LIBRARY, library_path, required_path

_log = logging.getLogger(__name__)

#: With a cold page cache, importing torch alone takes up to a minute.
_PROBE_TIMEOUT_S = 180.0
#: Its arguments are the libraries without and with kernels, the second empty where there is none.
#: Tells facts of each device, why the kernels do not run there, and why torch's own do not.
_PROBE = """
import ctypes, json, sys, torch
found = []
torch.cuda.init()
device_library = ctypes.CDLL(sys.argv[1])
device_library.gnnserve_cuda_open.restype = ctypes.c_char_p
missing = (device_library.gnnserve_cuda_open() or b"").decode()
library = ctypes.CDLL(sys.argv[2]) if sys.argv[2] else None
if library:
    library.gnnserve_cuda_error.restype = ctypes.c_char_p
for index in range(torch.cuda.device_count()):
    torch.cuda.set_device(index)
    facts = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    without = why = ""
    if library is None:
        without = "it was not built"
    elif code := library.gnnserve_cuda_usable(index):
        told = library.gnnserve_cuda_error(code).decode()
        without = f"it cannot use capability {facts.major}.{facts.minor}: {told}"
    if without and missing:
        why = f"{without}, and the CUDA runtime of torch has no {missing}"
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        why = str(error).partition("\\n")[0]
    uuid = str(getattr(facts, "uuid", ""))
    found.append([index, facts.name, uuid, free, total, without, why])
print("found " + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device that CUDA can use."""

    #: CUDA's device index among the visible ones.
    index: int
    name: str
    uuid: str
    #: Memory that no process holds now.
    free_bytes: int
    total_bytes: int
    #: False where only torch's own kernels run.
    has_kernels: bool = True


class NoCuda(Exception):
    """CUDA cannot be used; the message names the reason."""

    def __init__(self, reason: str, *, expected: bool = False) -> None:
        super().__init__(reason)
        #: Log level: a torch without CUDA is a choice, a driver that fails is a fault.
        self.level = logging.INFO if expected else logging.WARNING


def find_gpus(
    cuda_of_torch: Callable[[], str | None] | None = None,
    ask: Callable[[], str] | None = None,
    nvml: Any = None,
) -> tuple[Gpu, ...]:
    """Return the devices that CUDA can use; raises NoCuda for none. Arguments are for tests."""
    version = (cuda_of_torch or _cuda_of_torch)()
    if version is None:
        raise NoCuda("torch is built without it", expected=True)
    started = time.monotonic()
    said = (ask or _ask)()
    _log.info("asking CUDA took %.1f s", time.monotonic() - started)
    line = next((line for line in said.splitlines() if line.startswith("found ")), None)
    if line is None:
        told = said.strip().splitlines()
        raise NoCuda(told[-1] if told else "the probing process printed nothing")
    found, refused = [], []
    for *facts, without, why in json.loads(line.removeprefix("found ")):
        gpu = replace(Gpu(*facts), has_kernels=not without)
        if why:
            refused.append(f"{gpu.name} cannot be used: {why}")
            continue
        found.append(gpu)
        if without:
            _log.warning(
                "%s is used without %s (%s): models run on PyG's own code, and the host gathers "
                "features; see docs/cuda.md", gpu.name, CUDA_LIBRARY, without,
            )  # fmt: skip
    if not found:
        raise NoCuda("; ".join(refused) or "there is no device")
    for told_why in refused:
        _log.warning("%s", told_why)
    return tuple(_as_nvml_sees(gpu, nvml) for gpu in found)


def _cuda_of_torch() -> str | None:
    """Return the CUDA version that torch was built for, without importing torch; None for none."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return version


def _ask() -> str:
    """Run a process that uses CUDA and our libraries; return its output, or its errors.

    Only there it is seen whether they have code for each device.
    """
    libraries = str(required_path(DEVICE_LIBRARY)), str(library_path(CUDA_LIBRARY) or "")
    try:
        found = subprocess.run(
            [sys.executable, "-c", _PROBE, *libraries],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env={**os.environ, "CUDA_MODULE_LOADING": "LAZY"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"CUDA did not answer within {_PROBE_TIMEOUT_S:g} s"
    return found.stdout if found.returncode == 0 else found.stderr


def _as_nvml_sees(gpu: Gpu, nvml: Any = None) -> Gpu:
    """Return the GPU with free memory by NVML, which excludes the probe's own context.

    Many containers lack NVML or forbid it; there the probe's number stays.
    """
    try:
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}")
            return replace(gpu, free_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).free))
        finally:
            nvml.nvmlShutdown()
    except Exception as error:
        _log.info("NVML gives no free memory of %s: %s", gpu.name, error)
        return gpu
