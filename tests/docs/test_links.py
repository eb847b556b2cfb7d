"""Every link between pages leads to a file, and every anchor to a heading."""

import re

import pytest

from bench.kit.result import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md"]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as hosted pages name them."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        found = target.exists() and (
            not anchor or anchor in anchors(target.read_text(encoding="utf-8"))
        )
        if not found:
            broken.append(link)
    assert broken == []


def test_the_index_of_the_docs_lists_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for link in _LINK.findall(index.read_text(encoding="utf-8"))
    }
    assert set((ROOT / "docs").rglob("*.md")) - linked == {index}


GUIDES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "README.md"]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_says_first_whom_it_is_for(page):
    _, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert "For the person who" in " ".join(first.split())
