"""Pages show the results as they are, and every table has its place."""

from collections import Counter

import pytest

from bench.kit.page import filled, flat, grid, markdown, tables_of, written
from bench.kit.result import ROOT, read_result
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


def test_a_table_without_its_result_says_so():
    place = "<!-- table: a -->\n{}\n<!-- end -->"
    made = written(place.format(""), {"a": lambda: read_result("never_measured")})
    assert made == place.format("Not measured yet: never_measured.json is not among the results.")


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError, match="b"):
        written("<!-- table: b -->\n\n<!-- end -->", {})


def test_a_missing_field_is_a_dash():
    assert filled("{late:.1%}", {"late": 0.25}) == "25.0 %"
    assert filled("{late:.1%}", {"late": None}) == "–"
    assert filled("{late[p50]:.1%}", {}) == "–"


def test_rows_become_a_flat_table_or_a_grid():
    rows = [{"who": who, "rho": rho, "late": rho / 2} for who in "ab" for rho in (0.1, 0.5)]
    assert flat(rows[:1], {"who": "{who}", "late": lambda row: f"{row['late']:.0%}"}) == (
        "| who | late |\n|---|---|\n| a | 5 % |"
    )
    made = grid(rows[:3], ("who", {"b": "B", "a": "A"}), ("rho", "ρ {:g}"), "{late:.0%}", "x")
    assert made.splitlines() == [
        "| x | ρ 0.1 | ρ 0.5 |", "|---|---|---|", "| B | 5 % | – |", "| A | 5 % | 25 % |"
    ]  # fmt: skip
