"""The page "serve your own model" does what it says, block after block in an empty folder."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from serve.lane.measure.probe_signature import probe_signature
from serve.lane.models.loader import load_model
from serve.models.repository import find

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "serve-your-own-model.md"
_BLOCK = re.compile(r"(?:<!-- (\w+): (\S+) -->\n)?^```(sh|python|toml)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    #: `file` and its path, `needs` and what, or empty for one that is run.
    mark: str
    value: str
    language: str
    text: str


def blocks():
    return [Block(*(part or "" for part in found)) for found in _BLOCK.findall(PAGE.read_text())]


def run(block, folder, environment):
    """Run one block as a reader would; what it printed."""
    command = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else ["python", "-c"]
    done = subprocess.run(
        [*command, block.text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}"
    return done.stdout


@pytest.fixture
def environment(tmp_path):
    """A shell with this checkout's `gnnserve` and this Python, whatever is installed."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, arguments in (("gnnserve", "-m serve "), ("python", "")):
        tool = tools / name
        tool.write_text(
            f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{ROOT}"\n'
            f'exec "{sys.executable}" {arguments}"$@"\n'
        )
        tool.chmod(0o755)
    return os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": ""}


def test_every_block_is_understood():
    # A fence this test does not know, or a mark it cannot read, would silently not be run.
    found = blocks()
    fences = re.findall(r"^```(?!text)\w+$", PAGE.read_text(), re.M)
    assert len(found) == len(fences)
    assert {block.mark for block in found} == {"", "file", "needs"}
    assert {block.value for block in found if block.mark == "needs"} == {"server"}
    for block in found:
        if block.language == "python":
            compile(block.text, str(PAGE), "exec")


def test_blocks_run_in_order(tmp_path, environment):
    folder = tmp_path / "empty"
    folder.mkdir()
    printed = ""
    for block in blocks():
        if block.mark == "file":
            path = folder / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.mark != "needs":
            printed += run(block, folder, environment)
    accuracy = re.search(r"test accuracy (0\.\d\d)", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    signature = probe_signature(load_model(find(folder / "models", "mine")))
    assert (signature.num_features, signature.num_outputs, signature.rows) == (32, 5, "node")
