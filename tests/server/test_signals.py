"""Signals of a server, in a process without one."""

import signal
import subprocess
import sys

import pytest

from serve.server.signals import DRAINING, IGNORED
from tests.processes import PATIENCE_S

CHILD = """
import logging, sys, time
from serve.server.signals import StopSignals
logging.basicConfig(stream=sys.stdout, level="INFO", format="%(message)s")
limit_s, hangs, words = float(sys.argv[1]), sys.argv[2], sys.argv[3:]

def left():
    print("asked what is left", flush=True)
    if "endless words" in words:
        time.sleep(600)
    return "left: 3 requests"

def first():
    print("first", flush=True)
    if "a bug" in words:
        raise ValueError("a bug")

def reload():
    print("reload", flush=True)
    if "a bug" in words:
        raise ValueError("a bug")

signals = StopSignals(first, limit_s, left, lambda: print("last", flush=True), reload)
signals.listen()
print("listens", flush=True)
if hangs == "before":
    while True:
        time.sleep(600)
if "by itself" not in words:
    signals.wait()
signals.stop_by_itself()
if hangs == "after":
    while True:
        time.sleep(600)
print("ended in order", flush=True)
"""

#: Runs the command in argv on a terminal of its own, which controls it.
ON_A_TERMINAL = """
import fcntl, os, sys, termios
ours, theirs = os.openpty()
fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
os.set_inheritable(ours, True)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Child:
    def __init__(self, *arguments, before=()):
        command = [*before, sys.executable, "-c", CHILD, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.hears("listens")

    def hears(self, line):
        found = self.process.stdout.readline().strip()
        assert found == line

    def send(self, number):
        self.process.send_signal(number)

    def ends(self):
        """Exit code, and what was said until then."""
        said, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said


@pytest.fixture
def child():
    children = []

    def start(*arguments, **options):
        children.append(Child(*arguments, **options))
        return children[-1]

    yield start
    for one in children:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("number", DRAINING)
def test_the_main_thread_is_told_to_stop(child, number):
    found = child(600, "never")
    found.send(number)
    code, said = found.ends()
    assert code == 0
    assert "ended in order" in said


def test_a_bug_in_a_callback_does_not_stop_the_signals(child):
    found = child(0.3, "after", "a bug")
    found.send(signal.SIGTERM)
    code, said = found.ends()
    assert code == 1
    assert "ValueError: a bug" in said
    assert said.endswith("last\n")


def test_other_signals_are_ignored_and_logged(child):
    found = child(600, "never")
    for number in IGNORED:
        found.send(number)
        found.hears(f"{number.name} is ignored")
    found.send(signal.SIGTERM)
    assert found.ends()[0] == 0


@pytest.mark.parametrize("hangs", ["before", "after"])
def test_a_second_signal_ends_the_process_at_once(child, hangs):
    found = child(600, hangs)
    found.send(signal.SIGTERM)
    found.hears("first")
    found.hears("SIGTERM: stopping")
    found.send(signal.SIGQUIT)
    assert found.ends() == (128 + signal.SIGQUIT, "last\n")


def test_without_a_terminal_a_hangup_reads_files_again(child):
    found = child(600, "never", "a bug")
    for _ in range(2):  # a bug in it changes nothing
        found.send(signal.SIGHUP)
        found.hears("SIGHUP: reading configuration, tokens and certificates again")
        found.hears("reload")
        found.hears("Traceback (most recent call last):")
        while found.process.stdout.readline() != "ValueError: a bug\n":
            pass
        found.hears("")
    found.send(signal.SIGTERM)
    code, said = found.ends()
    assert code == 0
    assert "ended in order" in said


def test_on_a_terminal_a_hangup_is_its_end(child):
    found = child(600, "never", before=(sys.executable, "-c", ON_A_TERMINAL))
    found.send(signal.SIGHUP)
    code, said = found.ends()
    assert code == 0
    assert "reload" not in said
    assert "ended in order" in said


@pytest.mark.parametrize("hangs", ["before", "after"])
def test_a_stop_that_takes_too_long_is_forced_and_logged(child, hangs):
    found = child(0.3, hangs)
    found.send(signal.SIGTERM)
    found.hears("first")
    found.hears("SIGTERM: stopping")
    code, said = found.ends()
    assert code == 1
    assert "not stopped within 0.3 s, ending by force; left: 3 requests" in said


def test_a_stop_without_a_signal_is_forced_too(child):
    code, said = child(0.3, "after", "by itself").ends()
    assert code == 1
    assert "left: 3 requests" in said


def test_a_stop_is_forced_although_the_log_hangs(child):
    found = child(0.3, "after", "endless words")
    found.send(signal.SIGTERM)
    code, said = found.ends()
    assert code == 1
    assert "asked what is left" in said


def test_a_closed_terminal_is_ignored_under_nohup(child):
    found = child(600, "never", before=("nohup",))
    found.send(signal.SIGHUP)
    found.send(signal.SIGUSR1)
    found.hears("SIGUSR1 is ignored")
    found.send(signal.SIGTERM)
    assert found.ends()[0] == 0
