"""Ctrl-C while a command begins."""

import subprocess
import sys

#: Presses it when `serve.cli` is imported.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "serve.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from gnnserve.__main__ import main
"""


def ended(before=""):
    return subprocess.run(
        [sys.executable, "-c", f"{INTERRUPTED}{before}\nmain()", "--version"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_a_command_that_has_just_begun_ends_without_a_word():
    done = ended()
    assert done.returncode == 130
    assert done.stdout + done.stderr == ""


def test_a_command_that_was_started_to_ignore_it_goes_on():
    done = ended("signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert done.returncode == 0
    assert done.stdout
