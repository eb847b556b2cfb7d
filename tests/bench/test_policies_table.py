"""What docs/measurements/policies.md tells is what was found."""

import pytest

from bench.kit.page import placed
from bench.scheduling.policies_table import PAGE, of_limits, written_into


def test_the_page_shows_the_results_as_they_are():
    page = PAGE.read_text(encoding="utf-8")
    assert written_into(page) == page


def test_limits_are_told_as_parts_of_the_bound():
    def row(system, reach, missed):
        return {"workload": "mix", "system": system, "goodput": reach, "missed": {"0.8": missed}}

    rows = [
        row("as it is", 0.6, 0.02),
        row("told whom to give up", 0.64, 0.019),
        row("run times known", 0.7, 0.015),
        row("run times known, suspending free", 0.72, 0.01),
        row("bound", 0.8, 0.005),
    ]
    assert of_limits({"rows": rows}).splitlines() == [
        "|  | mix |",
        "|---|---|",
        "| `slack` + `preemptive` | 0.60 (75 %), 2.0 % |",
        "| the same, told whom to give up | 0.64 (80 %), 1.9 % |",
        "| told true run times | 0.70 (87 %), 1.5 % |",
        "| told these, and suspending for free | 0.72 (90 %), 1.0 % |",
        "| nobody can do better | 0.80, 0.5 % |",
    ]


def test_a_page_without_a_place_for_a_table_is_named():
    with pytest.raises(ValueError, match="no place for the table 'policies'"):
        placed("<!-- policies -->", "policies", "|")
