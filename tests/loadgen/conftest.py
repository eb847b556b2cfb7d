import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.kit.waiting import PATIENCE_S
from serve.native import front_lacks

ROOT = Path(__file__).parents[2]
FAKE_SERVER = Path(__file__).with_name("fake_server.py")


class FakeServer:
    def __init__(self, process):
        self.lines, self.end = process.stdout, process.stdin
        self.address = f"127.0.0.1:{self.lines.readline().strip()}"

    def wait_for_requests(self):
        assert self.lines.readline() == "called\n"

    def received(self):
        """End the server; return a digest of all messages it got, in any order."""
        self.end.close()
        return self.lines.read().split()[-1]


def command_of(server, sender, *arguments):
    """Return the command line of a load of small graphs."""
    command = [sys.executable, "-m", "loadgen", "--target", server.address, "--json", *sender]
    command += ["--timeout", str(PATIENCE_S)]
    command += ["--scale", "0.01", "--max-nodes", "200", "--max-edges", "2000"]
    return command + [str(argument) for argument in arguments]


@pytest.fixture
def fake_server():
    """Return a function that starts a fake server in a process of its own."""

    @contextmanager
    def start(delay_s=0.0, fail_every=0, hold=0):
        with subprocess.Popen(
            [sys.executable, str(FAKE_SERVER), str(delay_s), str(fail_every), str(hold)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": str(ROOT)},
            text=True,
        ) as process:
            try:
                yield FakeServer(process)
            finally:
                process.stdin.close()
                process.wait(PATIENCE_S)

    return start


@pytest.fixture(params=["python", "native"])
def sender(request):
    """Options that choose who sends."""
    if request.param == "python":
        return []
    if lacks := front_lacks():
        pytest.skip(lacks)
    return ["--native"]


@pytest.fixture
def load_command(sender):
    """Return a function that makes the command line of a load of small graphs."""

    return lambda server, *arguments: command_of(server, sender, *arguments)


@pytest.fixture
def load(load_command):
    """Return a function that runs a load and returns its exit code and its JSON output."""

    def run(server, *arguments):
        done = subprocess.run(
            load_command(server, *arguments),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    return run
