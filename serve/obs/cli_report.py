"""`gnnserve report`: the report's database as tables, JSON, CSV or a page."""

import csv as csv_format
import sys
from pathlib import Path

import msgspec

from serve.errors import ConfigError
from serve.obs.frame import DTYPES
from serve.obs.html import render_html
from serve.obs.read import read_database, read_rows
from serve.obs.render import render_report
from serve.obs.report import report_dict, report_of
from serve.terminal import Console


def run_report(
    db: Path,
    since_s: float | None = None,
    as_json: bool = False,
    html: Path | None = None,
    csv: Path | None = None,
) -> int:
    """Report on a database; returns the exit code, 2 when it cannot be read.

    Args:
        db: Database of a server.
        since_s: Only requests that arrived in the last so many seconds; None for all.
        as_json: Print JSON instead of tables.
        html: File for the page, `-` for standard output.
        csv: File for the rows, `-` for standard output.
    """
    try:
        if csv is not None:
            write_csv(db, since_s, csv)
        if html is None and csv is not None and not as_json:
            return 0
        frame, runs = read_database(db, since_s)
        report = report_of(frame, runs)
        if html is not None:
            _write(html, render_html(frame, runs, report))
        if as_json:
            encoded = msgspec.json.encode(report_dict(report))
            sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
        elif html is None:
            Console().print(render_report(report, runs))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except BrokenPipeError:
        return 0
    return 0


def write_csv(db: Path, since_s: float | None, target: Path) -> None:
    """Write all columns of all requests, in order of arrival; raises ConfigError."""
    rows = read_rows(db, since_s)
    first = next(rows, None)
    if str(target) == "-":
        writer = csv_format.writer(sys.stdout)
        writer.writerow(DTYPES)
        writer.writerows(() if first is None else (first, *rows))
        return
    try:
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv_format.writer(file)
            writer.writerow(DTYPES)
            if first is not None:
                writer.writerow(first)
                writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error


def _write(target: Path, content: str) -> None:
    if str(target) == "-":
        sys.stdout.write(content)
        return
    try:
        target.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error
