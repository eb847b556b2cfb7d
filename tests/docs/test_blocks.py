"""No block of a guide escapes its test, and each can at least be parsed."""

import os
import re
import subprocess
import sys
import tomllib

import pytest

from bench.kit.result import ROOT
from tests.docs.pages import PAGES, PROSE, blocks, texts

#: By page, the blocks that a test runs or reads: language and mark.
TRIED = {
    "README.md": {"sh install", "sh serve", "sh demo", "python server"},
    "CONTRIBUTING.md": {"sh", "python test", "python policy"},
    "docs/access.md": {"toml tls", "toml tokens", "toml tenant", "sh access"},
    "docs/cluster.md": {"sh front", "sh key", "toml passed", "sh local", "sh machines", "sh ray",
                        "sh change", "sh scale",
                        "sh page", "sh page-of", "sh report", "sh kuberay", "toml plan", "sh plan",
                        "sh shared", "toml shared", "toml changes", "toml seats", "toml edges",
                        "sh apply", "toml plan-serving", "sh plan-serving"},
    "docs/client.md": {"python server", "python targets"},
    "docs/import.md": {
        "python file=net.py", "python file=train.py",
        "sh import", "sh init", "sh server", "sh ask", "sh load",
    },
    "docs/measurements/gpu.md": {"sh gpu"},
    "docs/estimates.md": {"sh dev"},
    "docs/http.md": {"sh server"},
    "docs/load.md": {"sh server", "sh native", "sh data", "sh limit", "sh replay", "sh simulate",
                     "sh locust", "sh workers"},
    "docs/operators.md": {"sh check", "sh database", "sh server", "sh journal", "promql",
                          "yaml prometheus"},
    "docs/resident-graphs.md": {
        "sh dev", "sh cora", "toml cora", "python cora", "python server", "python alone",
        "toml config", "python file=models/fields/model.py", "python file=train.py", "sh typed",
        "toml typed", "python typed", "sh import",
    },
    "docs/scheduling.md": {"python simulator"},
    "docs/training.md": {"toml training", "sh training", "python training"},
    "docs/versions.md": {"sh versions", "toml versions"},
    "docs/serve-your-own-model.md": {
        "python file=models/mine/model.py", "python file=train.py",
        "toml file=models/mine/config.toml", "toml file=gnnserve.toml", "toml declared",
        "sh alone", "sh server", "python server", "python load",
        "python forward=adjs", "python forward=adj_t",
    },
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_its_test(page):
    shown = {
        f"{block.language} {block.mark}".strip()
        for block in blocks(page)
        if block.language not in PROSE
    }
    assert shown == TRIED.get(page, set())


@pytest.mark.parametrize("page", PAGES)
def test_blocks_can_be_parsed(page):
    for block in blocks(page, "python"):
        compile(block.text, page, "exec")
    for block in blocks(page, "toml"):
        tomllib.loads(block.text)
    for block in blocks(page, "sh"):
        subprocess.run(["bash", "-n", "-c", block.text], check=True)


def test_options_of_the_gpu_check_exist():
    told = {
        option for text in texts("docs/measurements/gpu.md", "sh", "gpu") for option in flags(text)
    }
    told |= set(re.findall(r"(?<=[`\s])--[a-z-]+", PAGES["docs/measurements/gpu.md"]))
    command = [sys.executable, "bench/gpu/check.py", "--help"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told - flags(known) == set()


@pytest.mark.parametrize(("mark", "option"), [("locust", "--web"), ("workers", "--worker")])
def test_options_of_loads_with_several_processes_exist(mark, option):
    (command,) = texts("docs/load.md", "sh", mark)
    words = [sys.executable, "-m", "loadgen", "--help"]
    wide = os.environ | {"COLUMNS": "200"}
    known = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=wide)
    assert option in flags(command)
    assert flags(command) - flags(known.stdout) == set()


def flags(text: str) -> set[str]:
    return set(re.findall(r"--[a-z-]+", text))
