"""Tables in pages that are made from results, each between markers in its page.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
#: Makes the text of a cell: a format string over the fields of a row, or a function of the row.
Cell = str | Callable[[Row], str]
#: A field, and the titles of its values: of those wanted, in order, or a format for all there are.
Axis = tuple[str, Mapping[Any, str] | str]

_PLACE = re.compile(r"(<!-- table: (.+?) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def flat(rows: Iterable[Row], columns: Mapping[str, Cell]) -> str:
    """Return a table with a line for each row; `columns` maps headings to cells."""
    lines = [[filled(cell, row) for cell in columns.values()] for row in rows]
    return markdown(list(columns), lines)


def grid(rows: Sequence[Row], down: Axis, across: Axis, cell: Cell, corner: str = "") -> str:
    """Return a table with a cell for each row, by the values of two of its fields."""
    by_case = {(row[down[0]], row[across[0]]): row for row in rows}
    lines = [
        [title, *(filled(cell, by_case.get((low, high), {})) for high in _titles(rows, across))]
        for low, title in _titles(rows, down).items()
    ]
    return markdown([corner, *_titles(rows, across).values()], lines)


def _titles(rows: Sequence[Row], axis: Axis) -> Mapping[Any, str]:
    field, titles = axis
    if isinstance(titles, str):
        return {row[field]: titles.format(row[field]) for row in rows}
    return titles


def filled(cell: Cell, row: Row) -> str:
    """Return the text of a cell; a dash where a field is missing."""
    try:
        text = cell.format(**row) if isinstance(cell, str) else cell(row)
    except (KeyError, TypeError):
        return "–"
    return re.sub(r"(?<=\d)%", " %", text)


def tables_of(page: str) -> list[str]:
    """Return the names of the tables in a page."""
    return [found[2] for found in _PLACE.finditer(page)]


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with each table made anew; raises KeyError for an unknown table.

    A table without a stored result says so in its place.
    """

    def made(name: str) -> str:
        make = tables[name]
        try:
            return make()
        except FileNotFoundError as error:
            return f"Not measured yet: {Path(error.filename).name} is not among the results."

    return _PLACE.sub(lambda found: found[1] + made(found[2]) + found[3], page)
