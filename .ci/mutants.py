"""Draws mutants of the scheduler's core, and says which its tests notice (`make mutants`).

    python .ci/mutants.py --count 58 --seed 1

Mutmut makes up the mutants: other comparisons, signs, constants, arguments. Each runs in a process
of its own against ``TESTS``, of which one has to fail: first those that run the changed lines, as
coverage tells, and when they pass all. As a plugin of pytest, this module loads a mutant in place
of its module. Exits with 1 when fewer than nine in ten are noticed; then a test is
missing, or code that nobody needs is there.
"""

import argparse
import difflib
import importlib.abc
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "serve" / "core"
TESTS = ("tests/core", "tests/sim")
#: A mutant whose tests do not end in this time is noticed.
LIMIT_S = 900.0
WANTED = 0.9
#: Exit code of pytest when a test fails.
_FAILED = 1


class Mutant(NamedTuple):
    """A module with one change."""

    path: Path
    number: int
    code: str

    @property
    def module(self) -> str:
        """Name of the module."""
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    @property
    def change(self) -> str:
        """The lines that differ."""
        before, after = self.path.read_text().splitlines(), self.code.splitlines()
        lines = difflib.unified_diff(before, after, lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))

    @property
    def lines(self) -> set[int]:
        """Numbers of the lines that differ, in the module as it is; from 1."""
        before, after = self.path.read_text().splitlines(), self.code.splitlines()
        blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        return {
            n + 1 for tag, i, j, *_ in blocks if tag != "equal" for n in range(i, max(j, i + 1))
        }


def mutants() -> Iterator[Callable[[], Mutant]]:
    """Yield what makes each mutant of the core."""
    from mutmut.mutation.file_mutation import create_mutations

    def made(path: Path, number: int, module: Any, one: Any) -> Mutant:
        return Mutant(path, number, module.deep_replace(one.original_node, one.mutated_node).code)

    for path in sorted(CORE.rglob("*.py")):
        module, found, *_ = create_mutations(str(path), path.read_text())
        for number, one in enumerate(found):
            yield partial(made, path, number, module, one)


def covering(tests: Sequence[str] = TESTS) -> Callable[[Mutant], list[str]]:
    """Run all tests once; returns what finds those that run a mutant's lines."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", "0", *tests,
        "--cov=serve.core", "--cov-context=test", "--cov-report=",
    ]  # fmt: skip
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "coverage"
        environment = {**os.environ, "COVERAGE_FILE": str(data)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = CoverageData(str(data))
        found.read()
        by_path = {path: found.contexts_by_lineno(path) for path in found.measured_files()}

    def those(mutant: Mutant) -> list[str]:
        by_line = by_path.get(str(mutant.path), {})
        run = {test for line in mutant.lines for test in by_line.get(line, ())}
        return sorted({test.partition("|")[0] for test in run if test})

    return those


def is_noticed(mutant: Mutant, tests: Sequence[str] = TESTS, first: Sequence[str] = ()) -> bool:
    """Return True unless the tests pass with the mutant; those of `first` run before all."""
    # A test that is not found is no failure of it.
    return (bool(first) and _code(mutant, first) == _FAILED) or _code(mutant, tests) != 0


def _code(mutant: Mutant, tests: Sequence[str]) -> int:
    """Return the exit code of pytest, `_FAILED` when it does not end in time."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mutant.py"
        file.write_text(mutant.code)
        chosen = Path(folder) / "tests"
        chosen.write_text("\n".join(tests))
        environment = {
            **os.environ,
            "MUTANT": f"{mutant.module}={file}",
            "PYTHONPATH": str(Path(__file__).parent),
        }
        plugins = ("-p", "mutants", "-n", "0")
        command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, f"@{chosen}"]
        try:
            return subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            return _FAILED


class Instead(importlib.abc.MetaPathFinder):
    """Finds the mutant in place of its module."""

    def __init__(self, module: str, file: str) -> None:
        self._module, self._file = module, file

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the mutant's spec; None for all other modules."""
        if name != self._module:
            return None
        return importlib.util.spec_from_file_location(name, self._file)


if "MUTANT" in os.environ:
    sys.meta_path.insert(0, Instead(*os.environ["MUTANT"].split("=", 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=58)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    everything = list(mutants())
    drawn = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    those = covering()
    noticed = 0
    for make in drawn:
        mutant = make()
        found = is_noticed(mutant, first=those(mutant))
        noticed += found
        word = "noticed" if found else "SURVIVED"
        print(f"{word}  {mutant.module} {mutant.number}\n{mutant.change}", flush=True)
    print(f"{noticed} of {len(drawn)} noticed, of {len(everything)} in all")
    sys.exit(noticed < WANTED * len(drawn))


if __name__ == "__main__":
    main()
