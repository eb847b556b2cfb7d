"""Names of the servers whose databases make one report."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from serve.errors import ConfigError


def by_machine(databases: Sequence[Path]) -> dict[str, Path]:
    """Return databases by what tells their paths apart, as `one` and `two` for one.db and two.db.

    Of `one/report.db` and `two/report.db` these are the folders. A database alone has no name.
    Raises ConfigError for the same database twice.
    """
    whole = [path.resolve() for path in databases]
    if len(whole) == 1:
        return {"": databases[0]}
    for number, path in enumerate(whole):
        if path in whole[:number]:
            raise ConfigError(f"{databases[number]}: given twice; each server has one database")
    paths = [path.with_suffix("").parts for path in whole]
    first = _common(paths)
    last = min(_common([path[::-1] for path in paths]), *(len(path) - first for path in paths))
    names = ["/".join(path[first : len(path) - last]) for path in paths]
    if len({*names, ""}) <= len(names):  # they differ in their suffixes, or one lies in another
        names = [str(path) for path in whole]
    return dict(zip(names, databases, strict=True))


def _common(paths: Sequence[tuple[str, ...]]) -> int:
    """Return how many parts all begin with."""
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return sum(1 for _ in alike)


def of_machine(databases: dict[str, Path], machine: str) -> dict[str, Path]:
    """Return one machine's database, or all for an empty name; raises ConfigError if unknown."""
    if not machine:
        return databases
    if machine not in databases:
        known = ", ".join(name for name in databases if name) or "one alone, which has no name"
        raise ConfigError(f"machine '{machine}': not among the databases; known: {known}")
    return {machine: databases[machine]}
