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

from serve.native_cuda import CUDA_LIBRARY, library_path

_log = logging.getLogger(__name__)

#: With a cold page cache, importing torch alone takes up to a minute.
_PROBE_TIMEOUT_S = 180.0
_PROBE = """
import ctypes, json, sys, torch
found = []
torch.cuda.init()
library = ctypes.CDLL(sys.argv[1])
library.gnnserve_cuda_error.restype = ctypes.c_char_p
for index in range(torch.cuda.device_count()):
    torch.cuda.set_device(index)
    facts = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    code = library.gnnserve_cuda_usable(index)
    why = library.gnnserve_cuda_error(code).decode() if code else ""
    able = f"{facts.major}.{facts.minor}"
    found.append([index, facts.name, str(getattr(facts, "uuid", "")), free, total, able, why])
torch.zeros(1, device="cuda").item()
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
    library = library_path(CUDA_LIBRARY)
    if library is None:
        raise NoCuda(f"{CUDA_LIBRARY} was not built, see docs/cuda.md")
    started = time.monotonic()
    said = ask() if ask is not None else _ask(library)
    _log.info("asking CUDA took %.1f s", time.monotonic() - started)
    line = next((line for line in said.splitlines() if line.startswith("found ")), None)
    if line is None:
        told = said.strip().splitlines()
        raise NoCuda(told[-1] if told else "the probing process printed nothing")
    found, refused = [], []
    for *facts, able, why in json.loads(line.removeprefix("found ")):
        gpu = Gpu(*facts)
        if why:
            refused.append(f"{CUDA_LIBRARY} cannot use {gpu.name}, of capability {able}: {why}")
        else:
            found.append(gpu)
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


def _ask(library: Path) -> str:
    """Run a process that uses CUDA and `library`; return its output, or its errors.

    Only there it is seen whether the library has code for each device.
    """
    try:
        found = subprocess.run(
            [sys.executable, "-c", _PROBE, str(library)],
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
