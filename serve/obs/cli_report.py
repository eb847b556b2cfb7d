"""`gnnserve report`: the report's database as tables, JSON, CSV or a page."""

import csv as csv_format
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from heapq import merge
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from serve.csv_cells import cells
from serve.errors import ConfigError
from serve.obs.databases import by_machine, of_machine
from serve.obs.frame import DTYPES
from serve.obs.html import render_html
from serve.obs.read import read_rows
from serve.obs.render import render_report
from serve.obs.report import read_summary, report_dict, report_of
from serve.obs.selection import Selection
from serve.terminal import Console


def run_report(
    *databases: Path,
    chosen: Selection | None = None,
    machine: str = "",
    as_json: bool = False,
    html: Path | None = None,
    csv: Path | None = None,
) -> None:
    """Report on databases as one. Raises ConfigError when a file cannot be read or written.

    Args:
        databases: One of each server.
        chosen: Only these requests; None for all.
        machine: Only this server, by what ``by_machine`` calls it; empty for all.
        as_json: Print JSON instead of tables.
        html: File for the page, `-` for standard output.
        csv: File for the rows, `-` for standard output.
    """
    chosen = chosen or Selection()
    # Whoever reads standard output may have had enough of it.
    with suppress(BrokenPipeError):
        found = of_machine(by_machine(databases), machine)
        if csv is not None:
            write_csv(found, chosen, csv)
        if html is None and csv is not None and not as_json:
            return
        summary, runs = read_summary(found, chosen)
        report = report_of(summary, runs)
        if html is not None:
            _write(html, render_html(summary, runs, report))
        if as_json:
            encoded = msgspec.json.encode(report_dict(report))
            sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
        elif html is None:
            Console().print(render_report(report, runs))


def write_csv(
    databases: Mapping[str, Path], chosen: Selection, target: Path, most: int = -1
) -> None:
    """Write all columns of the chosen requests, in order of arrival.

    The databases are by machine, which is the first column where there are several. Raises
    ConfigError when one cannot be read, the file cannot be written, or there are more than `most`
    rows (a negative number is no limit).
    """
    several = len(databases) > 1
    head = ["machine", *DTYPES] if several else list(DTYPES)
    parts = [
        _rows((name,) if several else (), path, chosen, most + 1 if most >= 0 else -1)
        for name, path in databases.items()
    ]
    rows = merge(*parts, key=itemgetter(head.index("arrived_unix_ns")))
    first = next(rows, None)
    try:
        with (
            nullcontext(sys.stdout)
            if str(target) == "-"
            else target.open("w", newline="", encoding="utf-8") as file
        ):
            writer = csv_format.writer(file)
            writer.writerow(head)
            if first is not None:
                writer.writerow(cells(first))
                for number, row in enumerate(rows, 2):
                    if 0 <= most < number:
                        raise ConfigError(
                            f"more than {most:,} rows: narrow them by since, from, until, model, "
                            "version, tenant, client or cause; gnnserve report --csv has no limit"
                        )
                    writer.writerow(cells(row))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error


def _rows(
    before: tuple[str, ...], path: Path, chosen: Selection, most: int
) -> Iterator[tuple[Any, ...]]:
    """Yield rows with `before` at the beginning of each."""
    for row in read_rows(path, chosen, most):
        yield (*before, *row)


def _write(target: Path, content: str) -> None:
    if str(target) == "-":
        sys.stdout.write(content)
        return
    try:
        target.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error
