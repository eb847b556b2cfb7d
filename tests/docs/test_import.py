"""docs/import.md does what it says: from a trained model to an answer in four commands."""

import shutil

from bench.kit.servers import ServerProcess
from serve.config import load_config
from tests.docs.pages import blocks
from tests.docs.test_own_model import environment, run
from tests.e2e.support import run_python

__all__ = ["environment"]

PAGE = "docs/import.md"


def test_four_commands_lead_to_an_answer(tmp_path, environment):
    folder = tmp_path / "empty"
    folder.mkdir()
    commands = {}
    for block in blocks(PAGE):
        kind, _, value = block.mark.partition("=")
        if kind == "file":
            (folder / value).write_text(block.text)
        else:
            commands[kind] = block
    run_python(["train.py"], folder)
    assert list(commands)[:4] == ["import", "init", "server", "ask"]

    run(commands["import"], folder, environment)
    run(commands["init"], folder, environment)
    assert commands["server"].text == "gnnserve serve\n"
    repository = load_config(folder / "gnnserve.toml").path("models")
    with ServerProcess(tmp_path, repository=repository) as server:

        def retarget(text):
            return text.replace("127.0.0.1:8001", server.target)

        ask = folder / "ask.py"
        ask.write_text(retarget(ask.read_text()))
        assert "output (3, 5)" in run(commands["ask"], folder, environment)

        shutil.copytree(repository / "mine" / "1", repository / "mine" / "2")
        text = commands["load"].text.replace("\n", f" --target {server.target}\n")
        printed = run(type(commands["load"])("sh", "load", text), folder, environment)
        assert "mine: serves version 1, 2" in printed
