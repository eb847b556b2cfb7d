"""A change of the core that its tests notice, and one that they cannot notice."""

import importlib.util
import random

import pytest

from bench.kit.result import ROOT

TESTS = ("tests/core/test_ordered.py",)
ORDERED = ROOT / "serve" / "core" / "state" / "ordered.py"


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / ".ci" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_module_that_fails_is_loaded_in_place_of_the_real_one(mutants):
    mutant = mutants.Mutant(ORDERED, 0, ORDERED.read_text() + "\nraise RuntimeError('a mutant')\n")
    assert mutant.module == "serve.core.state.ordered"
    assert mutant.change.endswith("+raise RuntimeError('a mutant')")
    assert mutants.is_noticed(mutant, TESTS)


def test_a_change_without_effect_survives(mutants):
    mutant = mutants.Mutant(ORDERED, 0, ORDERED.read_text() + "\nNOBODY_NEEDS_THIS = 1\n")
    assert not mutants.is_noticed(mutant, TESTS)


def test_mutmut_makes_up_changes_of_the_core(mutants):
    pytest.importorskip("mutmut", reason="make mutants installs it")
    found = list(mutants.mutants())
    assert len(found) > 500
    for make in random.Random(0).sample(found, 10):
        mutant = make()
        compile(mutant.code, mutant.path, "exec")
        assert mutant.change


def test_the_tests_that_run_a_line_are_found_and_fail_first(mutants):
    found = mutants.covering(TESTS)
    text = ORDERED.read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith("return "))
    mutant = mutants.Mutant(
        ORDERED, 0, text.replace(line, line.partition("return")[0] + "raise OSError")
    )
    tests = found(mutant)
    assert tests
    assert all(test.startswith(TESTS[0]) for test in tests)
    assert mutants.is_noticed(mutant, (), first=tests)
