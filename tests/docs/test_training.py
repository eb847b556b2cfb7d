"""docs/training.md: its configuration is one, and its commands work in their order."""

import shutil
import tomllib

import pytest

from bench.kit.servers import ServerProcess
from tests.docs.pages import texts
from tests.docs.test_operators import run
from tests.e2e.support import REPOSITORY, run_python

PAGE = "docs/training.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(REPOSITORY / "gcn", root / "gcn")
    (text,) = texts(PAGE, "toml", "training")
    table = tomllib.loads(text)
    folder = tmp_path_factory.mktemp("server")
    sections, graphs = {"training": table["training"]}, tuple(table["graph"])
    with ServerProcess(folder, repository=root, sections=sections, graphs=graphs) as found:
        yield found


def at_server(script, server):
    return "\n".join(f"{line} --target {server.target}" for line in script.splitlines())


@pytest.mark.slow
def test_the_commands_of_the_page_work(server, tmp_path):
    first, others = texts(PAGE, "sh", "training")
    done = run(at_server(first, server), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "job 1: gcn on community, 50 epochs" in done.stdout
    assert "job 1: gcn version 2, " in done.stdout
    assert "50/50" in done.stdout
    done = run(at_server(others, server), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "job 2: cancelled after" in done.stdout
    (text,) = texts(PAGE, "python", "training")
    said = run_python(["-c", text.replace("127.0.0.1:8001", server.target)], tmp_path)
    *_, state, summary = said.splitlines()
    assert state.startswith("done 20 ")
    assert summary.startswith("version 3, 9")
