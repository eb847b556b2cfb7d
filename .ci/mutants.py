"""Draws mutants of the scheduler's core, and says which its tests notice (`make mutants`).

    python .ci/mutants.py --count 58 --seed 1

Mutmut makes up the mutants: other comparisons, signs, constants, arguments. Each runs in a process
of its own against ``TESTS``, of which one has to fail. As a plugin of pytest, this module loads a
mutant in place of its module. Exits with 1 when fewer than nine in ten are noticed; then a test is
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


def mutants() -> Iterator[Callable[[], Mutant]]:
    """Yield what makes each mutant of the core."""
    from mutmut.mutation.file_mutation import create_mutations

    def made(path: Path, number: int, module: Any, one: Any) -> Mutant:
        return Mutant(path, number, module.deep_replace(one.original_node, one.mutated_node).code)

    for path in sorted(CORE.rglob("*.py")):
        module, found, *_ = create_mutations(str(path), path.read_text())
        for number, one in enumerate(found):
            yield partial(made, path, number, module, one)


def is_noticed(mutant: Mutant, tests: Sequence[str] = TESTS) -> bool:
    """Return True unless the tests pass with the mutant."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mutant.py"
        file.write_text(mutant.code)
        environment = {
            **os.environ,
            "MUTANT": f"{mutant.module}={file}",
            "PYTHONPATH": str(Path(__file__).parent),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "mutants", "-n", "0", *tests]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return True
    return done.returncode != 0


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
    noticed = 0
    for make in drawn:
        mutant = make()
        found = is_noticed(mutant)
        noticed += found
        word = "noticed" if found else "SURVIVED"
        print(f"{word}  {mutant.module} {mutant.number}\n{mutant.change}", flush=True)
    print(f"{noticed} of {len(drawn)} noticed, of {len(everything)} in all")
    sys.exit(noticed < WANTED * len(drawn))


if __name__ == "__main__":
    main()
