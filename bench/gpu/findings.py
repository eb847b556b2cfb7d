"""What ``make gpu-check`` found: put together, told, and kept where it outlasts the machine."""

import contextlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.aims import told

#: In the folder that is kept.
FINDINGS, LOGS, CALIBRATIONS = "gpu.json", "logs.tar.gz", "calibrations.tar.gz"
#: Of each log, its end: whoever keeps files may bound them.
_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class Keeper:
    """Writes what was found, again and again, so that a machine may go away at any moment."""

    #: Of the build: where logs, calibrations and what was found lie on this machine.
    build: Path
    #: What was found by this call and by those before it on this machine.
    content: Path
    #: Where it is to be in the end.
    folder: Path
    #: The folder outlasts the machine, and nothing else does.
    everything: bool

    def keep(self, found: dict[str, Any]) -> None:
        """Write the findings; where nothing else lasts, logs and calibrations too."""
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
        """What calls before this one found on this machine."""
        return load(self.content) if self.content.exists() else together([])

    def take(self, folder: Path) -> dict[str, Any]:
        """What a call on another machine found and kept in `folder`; its calibrations are used."""
        packed = folder / CALIBRATIONS
        if packed.exists():
            with tarfile.open(packed) as file:
                file.extractall(self.build / "calibrations", filter="data")
        return load(folder / FINDINGS)


def ending(path: Path) -> bytes:
    """The last of a log."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES))
        return file.read()


def pack(content: Iterable[tuple[str, bytes]], path: Path) -> None:
    """Make an archive of it; whoever stops in between leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside it there may be no room for one file more.
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as file:
        for name, data in content:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    path.write_bytes(made.getvalue())


def read(folder: Path) -> dict[str, Any]:
    """What the stages have found, by name; one that was cut off while it wrote is left out."""
    results = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError):
            results[path.stem] = load(path)
    return results


def load(path: Path) -> dict[str, Any]:
    """One file's content."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def together(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The stages and results of all, the later ones in place of those before.

    What was not run again stays as it was found.
    """
    merged: dict[str, Any] = {"stages": {}, "results": {}}
    for one in found:
        for name, row in one["stages"].items():
            if row["state"] != "not run" or name not in merged["stages"]:
                merged["stages"][name] = row
        merged["results"] |= one["results"]
    return merged


def write(found: dict[str, Any], path: Path) -> None:
    """Keep it as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(found, indent=1) + "\n")
    shutil.move(written, path)


def tell(found: dict[str, Any]) -> None:
    """Print how each stage ended, what must hold and does not, and every aim."""
    print("\n==> stages")
    for name, row in found["stages"].items():
        print(f"{row['state']:8} {name:18} {row.get('seconds', ''):>7} {row.get('why', '')}")
    print("\n==> aims")
    for line in told(found["results"], found["stages"]):
        print(line)
