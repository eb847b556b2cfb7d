"""docs/versions.md: its commands work in their order, and its file is read."""

import shutil
import tomllib

import pytest

from bench.kit.servers import ServerProcess
from serve.client import Client
from serve.models.version_file import read_rules
from tests.docs.pages import texts
from tests.docs.test_operators import run
from tests.e2e.support import REPOSITORY

PAGE = "docs/versions.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(REPOSITORY / "gcn", root / "gcn")
    for version in (2, 3):
        if (root / "gcn" / str(version)).exists():
            shutil.rmtree(root / "gcn" / str(version))
    shutil.copytree(root / "gcn" / "1", root / "gcn" / "2")
    with ServerProcess(tmp_path_factory.mktemp("server"), repository=root) as found:
        yield found


def at_server(script, server):
    """The commands as for that server, one a line."""
    lines = script.replace("localhost:8002", f"127.0.0.1:{server.http_port}").splitlines()
    return "\n".join(
        f"{line} --target {server.target}" if line.startswith("gnnserve") else f"{line} -f; echo"
        for line in lines
    )


def test_the_commands_of_a_rollout_work(server, tmp_path):
    rollout, on, http, shadow = texts(PAGE, "sh", "versions")
    done = run(at_server(rollout, server), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gcn: 1=90 2=10, canary 2" in done.stdout
    assert "10 %, canary" in done.stdout
    done = run(at_server(on, server), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [
        "gcn: 1=50 2=50, canary 2",
        "gcn: 2=100",
        "gcn: 1=50 2=50, canary 2",
    ]
    done = run(at_server(http, server), tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"1":90' in done.stdout
    done = run(at_server(shadow, server), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "shadow 2 of 50 %" in done.stdout
    assert "0 compared" in " ".join(done.stdout.split())
    with Client(server.target) as client:
        assert client.versions("gcn")[0].rules.split == {}


def test_the_file_is_read(tmp_path):
    (text,) = texts(PAGE, "toml", "versions")
    (tmp_path / "versions.toml").write_text(text)
    found = read_rules(tmp_path)
    assert found.now.shares == ((1, 90.0), (2, 10.0))
    assert found.now.canary == 2
    assert found.previous is not None
    assert tomllib.loads(text)["previous"]
