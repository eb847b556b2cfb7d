"""Write the tables of all pages from the results.

python -m bench.pages
"""

from collections.abc import Callable
from pathlib import Path

from bench.kit.page import tables_of, written
from bench.kit.result import ROOT
from bench.pages import chaos, cluster, front, host, listing, live, models, papers, scheduling

TABLES: dict[str, Callable[[], str]] = {
    **listing.TABLES,
    **scheduling.TABLES,
    **live.TABLES,
    **chaos.TABLES,
    **host.TABLES,
    **front.TABLES,
    **models.TABLES,
    **cluster.TABLES,
    **papers.TABLES,
}


def pages() -> list[Path]:
    """Return the pages that may hold tables."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "bench/README.md",
    ]


def main() -> None:
    """Write every page that has changed."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = written(text, TABLES) if tables_of(text) else text
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
