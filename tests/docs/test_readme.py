"""README.md: what it tells a reader to do, done against a real server."""

import json
import re
import tomllib

import pytest

from bench.kit.result import RESULTS
from bench.kit.servers import ROOT, ServerProcess
from tests.docs.pages import PAGES, texts
from tests.e2e.support import run_python

PAGE = "README.md"
_INLINE = re.compile(r"`(gnnserve [^`]+)`")


def here(command: str, server: ServerProcess) -> list[str]:
    """Return a `gnnserve …` of the page as arguments that ask this test's server for little."""
    text = command.replace("127.0.0.1:8001", server.target)
    text = text.replace("configs/dev.toml", str(server.config))
    text = text.replace("configs/gnnserve.db", str(server.database))
    text = re.sub(r"--duration \d+", "--duration 2 --max-nodes 300", text)
    return ["-m", "serve", *text.split()[1:]]


def test_its_shell_lines_are_those_that_others_run():
    """The demo and the installation have tests of their own: tests/cli and `.ci/try-wheel`."""
    assert [text.strip() for text in texts(PAGE, "sh", "demo")] == ["gnnserve demo"]
    assert texts(PAGE, "sh", "serve") == ["gnnserve serve --config configs/dev.toml\n"]


def test_the_extras_that_are_installed_exist():
    (command,) = texts(PAGE, "sh", "install")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for found in re.findall(r"\[(.*?)\]", command) for extra in found.split(",")}
    assert named <= set(project["optional-dependencies"])


def test_its_python_runs(server, tmp_path):
    for text in texts(PAGE, "python", "server"):
        printed = run_python(["-c", text.replace("127.0.0.1:8001", server.target)], tmp_path)
        assert "(3, 5)" in printed
        assert "qos_target_us" in printed


@pytest.mark.parametrize("command", _INLINE.findall(PAGES[PAGE]))
def test_its_commands_run(command, server, tmp_path):
    assert run_python(here(command, server), tmp_path)


def test_its_numbers_are_those_of_the_results():
    def result(name):
        return json.loads((RESULTS / f"{name}.json").read_text())

    ratios = result("executors")["ratios"]
    eager, compiled = (ratios[kind]["all"]["geometric_mean"] for kind in ("csr", "csr_compiled"))
    decisions = [row["mean_us"] for row in result("decisions")["rows"]]
    memory = result("pmc_accuracy")["all"]
    for told in (
        f"{eager} times as fast as stock PyG on one thread, {compiled} times",
        f"{min(decisions):.0f} to {max(decisions):.0f} µs",
        f"in {memory['runs']:,} runs",
    ):
        assert told in PAGES[PAGE]
    assert memory["error_low"] == 0
    assert memory["error_worst_of_linear"] < 0.01
