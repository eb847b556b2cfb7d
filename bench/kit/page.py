"""Tables in docs/measurements that are made from results, each between markers in its page."""

from collections.abc import Sequence


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    ruled = ["|" + "---|" * len(head)]
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], *ruled, *lines[1:]])


def placed(page: str, marker: str, table: str) -> str:
    """The page with the table behind its marker, up to the next end; ValueError if it has none."""
    before, start, rest = page.partition(f"<!-- {marker} -->\n")
    _, end, after = rest.partition("\n<!-- end -->")
    if not end:
        raise ValueError(f"no place for the table '{marker}'")
    return before + start + table + end + after
