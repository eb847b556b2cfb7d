"""Tables in pages that are made from results, each between markers in its page.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Callable, Mapping, Sequence

_PLACE = re.compile(r"(<!-- table: (.+?) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def tables_of(page: str) -> list[str]:
    """Return the names of the tables in a page."""
    return [found[2] for found in _PLACE.finditer(page)]


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with each table made anew; raises KeyError for an unknown table."""
    return _PLACE.sub(lambda found: found[1] + tables[found[2]]() + found[3], page)


def percent(share: float, digits: int = 1) -> str:
    """Return a share as text, e.g. `2.0 %`."""
    return f"{100 * share:.{digits}f} %"


def ranged(values: Sequence[float], digits: int = 2) -> str:
    """Return median, lowest and highest as text, e.g. `0.97 (0.81 to 1.13)`."""
    middle, low, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
