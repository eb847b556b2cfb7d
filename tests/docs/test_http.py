"""docs/http.md: its commands work, and its statuses are the server's."""

import json
import re
import shutil
import subprocess

import pytest

from bench.kit.waiting import PATIENCE_S
from serve.errors import ErrorCode
from serve.rest.process import missing_packages
from tests.docs.pages import PAGES, texts

PAGE = "docs/http.md"


@pytest.mark.skipif(bool(missing_packages()), reason="the gateway's packages")
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_its_commands_work(server):
    answers = []
    for script in texts(PAGE, "sh", "server"):
        script = script.replace("localhost:8002", f"127.0.0.1:{server.http_port}")
        # Answers have no end of line.
        script = script.replace("curl -s ", "echo; curl -sS --fail ")
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers += [json.loads(line) for line in done.stdout.splitlines() if line]
    by_ids, whole, joint, metadata, models = answers[:5]
    assert [len(row) for row in by_ids] == [5, 5, 5]
    assert whole["id"] == "first"
    assert whole["parameters"]["qos_target_us"] == 50_000
    assert whole["outputs"][0]["shape"] == [3, 5]
    outputs = ["gcn/output", "sage/output", "gat:1/output"]
    assert [output["name"] for output in joint["outputs"]] == outputs
    assert metadata["name"] == "gnnserve"
    assert "gcn" in models["models"]


def test_every_status_is_told():
    table = PAGES[PAGE].partition("## Errors")[2].partition("##")[0]
    told = set(re.findall(r"\b[45]\d\d\b", table))
    assert {str(code.http_status) for code in ErrorCode} <= told
