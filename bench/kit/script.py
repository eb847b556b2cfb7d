"""The command line that all benches share: profiles, options, tables, the result."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from bench.kit.page import filled
from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess


@dataclass(frozen=True)
class Table:
    """A table printed from a list of rows of the result.

    `columns` maps a heading to a format string over the fields of a row, e.g. `{late:.1%}`.
    """

    title: str
    rows: str
    columns: Mapping[str, str]

    def show(self, content: Mapping[str, Any], console: Console) -> None:
        """Print the rows of `content`."""
        table = RichTable(title=self.title)
        for number, heading in enumerate(self.columns):
            table.add_column(heading, justify="right" if number else "left")
        for row in content[self.rows]:
            table.add_row(*(filled(text, row) for text in self.columns.values()))
        console.print(table)


@dataclass(frozen=True)
class Script:
    """A bench: its options in two profiles, `full` and `quick`, and the tables it prints.

    Every option of `full` becomes an argument of that name and type. None stands for a path; a
    tuple is given by commas, or by semicolons where its values hold commas. `quick` overrides some
    options, to show that the bench works; its result is stored only where `--out` says so.
    """

    name: str
    full: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()

    def main(
        self, measure: Callable[[argparse.Namespace], dict[str, Any]], about: str | None
    ) -> dict[str, Any]:
        """Measure as the command line asks, print the tables and store what `measure` returns."""
        options = self.parse(about)
        # Containers often set it. Users' processes find what Python has compiled before.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        before, ServerProcess.quick = ServerProcess.quick, options.quick
        try:
            content = measure(options)
        finally:
            ServerProcess.quick = before
        console = Console(width=140)
        for table in self.tables:
            table.show(content, console)
        out = options.out or (None if options.quick else RESULTS / f"{self.name}.json")
        if out is not None:
            write_result(out, content)
            console.print(str(out))
        return content

    def parse(
        self, about: str | None, arguments: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """Return the options of the command line, those not given from the profile."""
        parser = argparse.ArgumentParser(
            description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--quick", action="store_true", help="show that it works; no result")
        parser.add_argument("--out", type=Path, help="file for the result")
        for name, value in self.full.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                parser.add_argument(flag, action="store_true", default=None)
            else:
                parser.add_argument(flag, type=_reader(value), help=f"default {value}")
        options = parser.parse_args(arguments)
        profile = {**self.full, **(self.quick if options.quick else {})}
        for name, value in profile.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        return options


def _reader(value: Any) -> Callable[[str], Any]:
    """Return what turns an argument into the type of the profile's value."""
    if value is None:
        return Path
    if isinstance(value, tuple):
        kind, mark = type(value[0]), ";" if any("," in str(one) for one in value) else ","
        return lambda text: tuple(kind(one) for one in text.split(mark))
    return type(value)
