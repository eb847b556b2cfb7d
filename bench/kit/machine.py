"""The machine a result was measured on, stored with every result."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("gnnserve", "torch", "torch-geometric", "numpy", "grpcio", "msgspec")


def machine_facts() -> dict[str, Any]:
    """Return CPU model, usable cores, memory in bytes, system, Python and packages."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def gpu_facts(names: str, *, units: bool = True) -> list[str]:
    """Return the first GPU's values of those names of ``nvidia-smi --help-query-gpu``.

    Returns an empty list where there is no driver.
    """
    form = "csv,noheader" if units else "csv,noheader,nounits"
    try:
        said = subprocess.run(
            ["nvidia-smi", "--id=0", f"--query-gpu={names}", f"--format={form}"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return said.stdout.strip().split(", ")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
