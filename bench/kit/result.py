"""Results of benches: their folder, and the envelope of each."""

import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.kit.machine import machine_facts

#: Keys that every result has.
ENVELOPE = frozenset({"commit", "date", "command", "machine", "load_average"})
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
DOCS_PATH = ROOT / "docs"


def read_result(name: str) -> Any:
    """Return the result of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write a result in its envelope, one line for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(one_row_a_line(envelope() | content) + "\n", encoding="utf-8")


def envelope() -> dict[str, Any]:
    """Return commit (`+`: with uncommitted changes), UTC date, command, machine, load averages."""
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": _command(),
        "machine": machine_facts(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def one_row_a_line(content: dict[str, Any]) -> str:
    """Return JSON in which each value, and each row of a list of rows, takes one line."""
    lines = [f"{json.dumps(key)}: {_value(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
    if isinstance(value, dict) and any(isinstance(each, dict | list) for each in value.values()):
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {_value(v)}" for k, v in value.items()) + "\n}"
    return json.dumps(value)


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout
    return found.stdout.strip()


def _command() -> str:
    """Return what was asked for, without the file of the result."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or "-m" not in sys.orig_argv:
        return shlex.join(["python", *sys.argv])
    # Some scripts take words off `sys.argv`.
    words = iter(sys.orig_argv[sys.orig_argv.index("-m") + 2 :])
    kept = []
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["python", "-m", spec.name.removesuffix(".__main__"), *kept])
