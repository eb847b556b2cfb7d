"""Cells of CSV files that a spreadsheet shows as the text they are.

A spreadsheet takes a text that begins as a formula for one, and clients choose tenants, names and
messages. An apostrophe before such a text keeps it text, as OWASP advises.
"""

from collections.abc import Iterable, Iterator

#: With what a formula begins, in one spreadsheet or another.
_BEGINS_FORMULA = tuple("=+-@\t\r\n＝＋－＠")


def cells(row: Iterable[object]) -> Iterator[object]:
    """Yield the cells of a row, with an apostrophe before each text that would be a formula."""
    for cell in row:
        if isinstance(cell, str) and cell.startswith(_BEGINS_FORMULA) and not _is_number(cell):
            yield f"'{cell}"
        else:
            yield cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
