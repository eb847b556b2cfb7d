"""Findings of ``make gpu-check``: merged, printed, and saved where they outlast the machine."""

import contextlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.aims import verdicts

#: Files in the folder that is saved.
FINDINGS, LOGS, CALIBRATIONS = "gpu.json", "logs.tar.gz", "calibrations.tar.gz"
#: Of each log only the end is saved.
_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class Keeper:
    """Saves the findings again and again, as the machine may go away at any moment."""

    #: Folder of logs, calibrations and results on this machine.
    build: Path
    #: Findings of this call and of earlier ones on this machine.
    content: Path
    #: Where the findings go in the end.
    folder: Path
    #: True when only that folder outlasts the machine.
    everything: bool

    def keep(self, found: dict[str, Any]) -> None:
        """Write the findings; with `everything`, logs and calibrations too."""
        write(found, self.content)
        write(found, self.folder / FINDINGS)
        if self.everything:
            logs = [(path.name, ending(path)) for path in sorted(self.build.glob("*.log"))]
            pack(logs, self.folder / LOGS)
            made = sorted((self.build / "calibrations").glob("*"))
            pack(
                [(p.name, p.read_bytes()) for p in made if p.is_file()], self.folder / CALIBRATIONS
            )

    def before(self) -> dict[str, Any]:
        """Return the findings of earlier calls on this machine."""
        return load(self.content) if self.content.exists() else together([])

    def take(self, folder: Path) -> dict[str, Any]:
        """Return the findings that a call on another machine saved; take over its calibrations."""
        packed = folder / CALIBRATIONS
        if packed.exists():
            with tarfile.open(packed) as file:
                file.extractall(self.build / "calibrations", filter="data")
        return load(folder / FINDINGS)


def ending(path: Path) -> bytes:
    """Return the end of a log."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES))
        return file.read()


def pack(content: Iterable[tuple[str, bytes]], path: Path) -> None:
    """Write an archive at once, so that an interruption leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # There may be no room for a second file.
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as file:
        for name, data in content:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    path.write_bytes(made.getvalue())


def read(folder: Path) -> dict[str, Any]:
    """Return the results of the stages by name, without files that were cut off."""
    results = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError):
            results[path.stem] = load(path)
    return results


def load(path: Path) -> dict[str, Any]:
    """Return the content of one file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def together(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the stages and results of all, later ones replacing earlier ones.

    A stage that was not run again keeps its earlier findings.
    """
    merged: dict[str, Any] = {"stages": {}, "results": {}}
    for one in found:
        for name, row in one["stages"].items():
            if row["state"] != "not run" or name not in merged["stages"]:
                merged["stages"][name] = row
        merged["results"] |= one["results"]
    return merged


def write(found: dict[str, Any], path: Path) -> None:
    """Write JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(found, indent=1) + "\n")
    shutil.move(written, path)


def tell(found: dict[str, Any]) -> None:
    """Print how each stage ended, and the verdict on every aim."""
    print("\n==> stages")
    for name, row in found["stages"].items():
        print(f"{row['state']:8} {name:18} {row.get('seconds', ''):>7} {row.get('why', '')}")
    print("\n==> aims")
    for verdict in verdicts(found["results"], found["stages"]):
        print(verdict)
