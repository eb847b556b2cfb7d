"""Pages show the results as they are, and every table has its place."""

from collections import Counter

import pytest

from bench.kit.page import markdown, tables_of, written
from bench.kit.result import ROOT
from bench.pages.__main__ import TABLES, pages

PAGES = [page for page in pages() if tables_of(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_the_results_as_they_are(page):
    text = page.read_text(encoding="utf-8")
    assert written(text, TABLES) == text, "run python -m bench.pages"


def test_every_table_stands_in_one_page():
    placed = Counter(name for page in PAGES for name in tables_of(page.read_text(encoding="utf-8")))
    assert placed == Counter(dict.fromkeys(TABLES, 1))


def test_a_table_is_replaced_and_the_rest_stays():
    page = "before\n<!-- table: a -->\nold\nold\n<!-- end -->\nafter\n"
    made = written(page, {"a": lambda: markdown(["x", "y"], [["1", "2"]])})
    assert made == (
        "before\n<!-- table: a -->\n| x | y |\n|---|---|\n| 1 | 2 |\n<!-- end -->\nafter\n"
    )


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError, match="b"):
        written("<!-- table: b -->\n\n<!-- end -->", {})
