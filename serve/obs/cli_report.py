"""`gnnserve report`: the report's database as tables, JSON, CSV or a page."""

import csv as csv_format
import sys
from contextlib import nullcontext
from pathlib import Path

import msgspec

from serve.errors import ConfigError
from serve.obs.frame import DTYPES
from serve.obs.html import render_html
from serve.obs.read import read_rows
from serve.obs.render import render_report
from serve.obs.report import read_summary, report_dict, report_of
from serve.obs.selection import Selection
from serve.terminal import Console


def run_report(
    db: Path,
    chosen: Selection | None = None,
    as_json: bool = False,
    html: Path | None = None,
    csv: Path | None = None,
) -> int:
    """Report on a database; returns the exit code, 2 when it cannot be read.

    Args:
        db: Database of a server.
        chosen: Only these requests; None for all.
        as_json: Print JSON instead of tables.
        html: File for the page, `-` for standard output.
        csv: File for the rows, `-` for standard output.
    """
    chosen = chosen or Selection()
    try:
        if csv is not None:
            write_csv(db, chosen, csv)
        if html is None and csv is not None and not as_json:
            return 0
        summary, runs = read_summary(db, chosen)
        report = report_of(summary, runs)
        if html is not None:
            _write(html, render_html(summary, runs, report))
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


def write_csv(db: Path, chosen: Selection, target: Path, most: int = -1) -> None:
    """Write all columns of the chosen requests, in order of arrival.

    Raises ConfigError when the database cannot be read, the file cannot be written, or there are
    more than `most` rows (a negative number is no limit).
    """
    rows = read_rows(db, chosen, most + 1 if most >= 0 else -1)
    first = next(rows, None)
    try:
        with (
            nullcontext(sys.stdout)
            if str(target) == "-"
            else target.open("w", newline="", encoding="utf-8") as file
        ):
            writer = csv_format.writer(file)
            writer.writerow(DTYPES)
            if first is not None:
                writer.writerow(first)
                for number, row in enumerate(rows, 2):
                    if 0 <= most < number:
                        raise ConfigError(
                            f"more than {most:,} rows: narrow them by since, from, until, model, "
                            "version, tenant, client or cause; gnnserve report --csv has no limit"
                        )
                    writer.writerow(row)
    except BrokenPipeError:
        raise
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
