"""What the README and the pages tell a reader to do, done: every command against a real server."""

import re

import pytest

from bench.kit.servers import ROOT, ServerProcess
from serve.models.repository import scan
from tests.e2e.support import run_python

README = (ROOT / "README.md").read_text()
OWN_MODEL = (ROOT / "docs" / "serve-your-own-model.md").read_text()
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`(gnnserve [^`]+)`")
#: Set-up and tests: what runs this test; the demo has a test of its own.
_MAKE = {"make demo", "make test"}


def here(command: str, server: ServerProcess) -> list[str]:
    """A `gnnserve …` of the pages, at this test's server, with little load."""
    text = command.replace("127.0.0.1:8001", server.target)
    text = text.replace("configs/dev.toml", str(server.config))
    text = text.replace("configs/gnnserve.db", str(server.database))
    text = re.sub(r"--duration \d+", "--duration 2 --max-nodes 300", text)
    return ["-m", "serve", *text.split()[1:]]


def test_every_shell_line_of_the_readme_is_known():
    lines = {
        line.strip()
        for language, text in _FENCE.findall(README)
        if language == "sh"
        for line in text.splitlines()
    }
    assert lines == _MAKE | {".venv/bin/gnnserve serve --config configs/dev.toml"}


def test_the_readmes_python_runs(server, tmp_path):
    blocks = [text for language, text in _FENCE.findall(README) if language == "python"]
    assert blocks
    for text in blocks:
        printed = run_python(["-c", text.replace("127.0.0.1:8001", server.target)], tmp_path)
        assert "(3, 5)" in printed
        assert "qos_target_us" in printed


@pytest.mark.parametrize("command", _INLINE.findall(README))
def test_the_readmes_commands_run(command, server, tmp_path):
    assert run_python(here(command, server), tmp_path)


def test_the_own_model_page_serves_and_answers(tmp_path):
    """Its files, its training, then its server with its client."""
    for kind, path, text in re.findall(
        r"<!-- (file): (\S+) -->\n```\w+\n(.*?)^```$", OWN_MODEL, re.M | re.S
    ):
        assert kind == "file"
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    environment_path = tmp_path / "models" / "mine"
    code = (tmp_path / "train.py").read_text()
    run_python(
        ["-c", f"import sys; sys.path.insert(0, {str(environment_path)!r})\n{code}"], tmp_path
    )
    assert len(scan(tmp_path / "models")) == 1
    client = re.findall(r"<!-- needs: server -->\n```python\n(.*?)^```$", OWN_MODEL, re.M | re.S)
    with ServerProcess(tmp_path, repository=tmp_path / "models") as running:
        for text in client:
            printed = run_python(["-c", text.replace("127.0.0.1:8001", running.target)], tmp_path)
            accuracy = re.search(r"test accuracy (0\.\d\d)", printed)
            assert accuracy is not None
            assert float(accuracy[1]) > 0.9
