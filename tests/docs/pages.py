"""The pages as tests see them: their text, and the blocks that a reader would copy.

The words behind a fence's language tell how its block is tried: ``sh server`` needs a running
server, ``python file=train.py`` is a file that later blocks use. `COVERED` lists every kind with
the test that tries it.
"""

import re
from dataclasses import dataclass

from bench.kit.result import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
#: Languages of blocks that are looked at and not run.
PROSE = {"text", "mermaid"}
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    #: The first word behind the fence: `sh`, `python`, `toml`, `promql`; empty when there is none.
    language: str
    #: The words after it.
    mark: str
    text: str


def blocks(page: str, language: str | None = None, mark: str | None = None) -> list[Block]:
    """Return the blocks of a page in their order, of one language and mark if these are given."""
    found = []
    for info, text in _FENCE.findall(PAGES[page]):
        first, _, rest = info.partition(" ")
        found.append(Block(first, rest, text))
    return [
        block
        for block in found
        if language in (None, block.language) and mark in (None, block.mark)
    ]


def texts(page: str, language: str, mark: str = "") -> list[str]:
    """Return the texts of a page's blocks of one language and mark."""
    return [block.text for block in blocks(page, language, mark)]
