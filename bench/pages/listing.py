"""The tables of bench/README.md."""

import os
from collections.abc import Callable
from functools import partial

from bench.kit.page import markdown
from bench.kit.result import RESULTS, ROOT
from bench.registry import SECTIONS, Entry


def section(name: str) -> str:
    """Return a row for each question of the section."""
    head = ["question", "script", "result", "page"]
    return markdown(head, [_row(entry) for entry in SECTIONS[name]])


def _row(entry: Entry) -> list[str]:
    module = entry.script.split()[0].replace(".", "/")
    path = f"{module}.py" if (ROOT / "bench" / f"{module}.py").exists() else f"{module}/__main__.py"
    stored = (name for name in entry.results if (RESULTS / f"{name}.json").exists())
    results = ", ".join(f"[{name}](results/{name}.json)" for name in stored)
    page = f"[{entry.page.rpartition('/')[2]}]({os.path.relpath(entry.page, 'bench')})"
    apart = f" ({entry.apart})" if entry.apart else ""
    return [entry.question + apart, f"[`{entry.script}`]({path})", results, page]


TABLES: dict[str, Callable[[], str]] = {name: partial(section, name) for name in SECTIONS}
