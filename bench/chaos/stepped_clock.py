"""A wall clock of a server's own, which can be stepped while the machine's stays as it is.

A library replaces the functions that read the clock in the server's processes (LD_PRELOAD). It adds
a number of seconds, which this process writes into a file that all of them map.
"""

import hashlib
import mmap
import os
import subprocess
from pathlib import Path

from bench.kit.result import ROOT

_SOURCE = Path(__file__).with_suffix(".cpp")


class SteppedClock:
    """The clock of the processes that start with `environment`."""

    def __init__(self, folder: Path) -> None:
        """Build the library where it is not yet; raises OSError or CalledProcessError."""
        path = folder / "clock"
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(_library()), "STEPPED_CLOCK": str(path)}

    @property
    def offset_s(self) -> int:
        """Seconds that the clock is ahead of the machine's."""
        return int.from_bytes(self._memory[:8], "little", signed=True)

    def step(self, offset_s: int) -> None:
        """Set the clock so many seconds ahead of the machine's, or behind it."""
        self._memory[:8] = offset_s.to_bytes(8, "little", signed=True)


def _library() -> Path:
    """Return the built library; its name stays, as calibrations are cached by what is preloaded."""
    content = _SOURCE.read_bytes()
    path = ROOT / "build" / f"stepped_clock-{hashlib.sha256(content).hexdigest()[:12]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        command = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", str(_SOURCE), "-ldl"]
        subprocess.run([*command, "-o", str(draft)], check=True, capture_output=True, text=True)
        draft.rename(path)
    return path
