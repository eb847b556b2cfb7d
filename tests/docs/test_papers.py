"""docs/papers.md: every file that it names is there, and every row says where or that it is not."""

import re

from bench.kit.result import ROOT
from tests.docs.pages import PAGES

PAGE = PAGES["docs/papers.md"]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| mechanism")
]


def test_every_file_is_there():
    named = re.findall(r"`((?:serve|csrc|bench|tests)/[^`]+)`", PAGE)
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_what_is_claimed_has_a_test_or_a_script():
    assert len(ROWS) >= 20
    for mechanism, here, shown, *_ in ROWS:
        assert "not built" in here or "`" in shown, mechanism
