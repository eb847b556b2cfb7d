"""`.ci/tests` on made-up tests: what fails once is named, what fails twice fails."""

import os
import subprocess
import sys

import pytest

from bench.kit.servers import ROOT
from bench.kit.waiting import PATIENCE_S

#: No more than is needed, as that takes time.
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
#: Each test fails until it was tried as often as its argument says.
TESTS = """
from pathlib import Path

import pytest

@pytest.mark.parametrize(("number", "passes_at"), list(enumerate({passes_at})))
def test_made_up(number, passes_at):
    tries = Path(__file__).with_name(f"tries of {{number}}")
    tries.open("a").write("x")
    assert len(tries.read_text()) >= passes_at
"""


@pytest.fixture
def run(tmp_path):
    """Runs such tests, or others, as CI does; the exit code, and the lines after the last run."""

    def run(tests, processes=0):
        text = tests if isinstance(tests, str) else TESTS.format(passes_at=tests)
        (tmp_path / "test_made_up.py").write_text(text)
        (tmp_path / "pytest.ini").touch()
        done = subprocess.run(
            [ROOT / ".ci" / "tests", sys.executable, "-m", "pytest", "-n", str(processes)],
            cwd=tmp_path,
            env=os.environ | PLUGINS,
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
        return done.returncode, done.stdout.rpartition(" in ")[2].splitlines()[1:]

    def tries(number):
        return len((tmp_path / f"tries of {number}").read_text())

    run.tries = tries
    return run


def test_all_that_passes_is_run_once(run):
    assert run([1, 1]) == (0, [])
    assert (run.tries(0), run.tries(1)) == (1, 1)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_failure_is_named_before_later_tests(tmp_path, processes):
    (tmp_path / "conftest.py").write_text("from tests.failures import pytest_configure\n")
    (tmp_path / "test_made_up.py").write_text(
        "def test_fails():\n    assert False\n\ndef test_passes():\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(processes)], cwd=tmp_path,
        env=os.environ | PLUGINS | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    before_reports = done.stdout.partition("= FAILURES =")[0].splitlines()
    assert "FAILED test_made_up.py::test_fails (call)" in before_reports


@pytest.mark.parametrize("processes", [0, 2])
def test_up_to_three_are_tried_again_and_named(run, processes):
    code, told = run([2, 1, 2, 2], processes)
    assert code == 0
    assert told == [
        "",
        "Failed at first, passed alone:",
        "  test_made_up.py::test_made_up[0-2]",
        "  test_made_up.py::test_made_up[2-2]",
        "  test_made_up.py::test_made_up[3-2]",
    ]
    assert [run.tries(number) for number in range(4)] == [2, 1, 2, 2]


def test_a_second_failure_fails(run):
    assert run([2, 3]) == (1, [])
    assert (run.tries(0), run.tries(1)) == (2, 2)


def test_more_than_three_fail_at_once(run):
    assert run([2] * 4) == (1, ["4 tests failed; 1 to 3 would have been tried again"])
    assert run.tries(0) == 1


def test_what_is_no_failure_of_a_test_is_not_tried_again(run):
    assert run("import nowhere") == (2, [])
