"""What a confined process may not do any more; each in a process of its own."""

import os
import subprocess
import sys

import pytest

from serve.lane.confinement import filter_program
from tests.processes import PATIENCE_S

CONFINE = """
import os, resource, signal, socket, subprocess, sys
from serve.ipc.setup import Confinement
from serve.lane.confinement import confine
assert confine(Confinement(os.getppid(), network={network}, memory_bytes=256 << 20)) == ""
{then}
"""


def confined(then: str, *, network: bool = False) -> str:
    """Return what the statements print in a confined process, or the last line of its error."""
    code = CONFINE.format(network=network, then=then)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "call",
    [
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 0)",
        "os.killpg(os.getpgid(os.getppid()), 0)",
        "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
        "socket.socket()",
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "os.chroot('/')",
        "__import__('time').clock_settime(0, 0)",
    ],
)
def test_what_is_refused_is_an_error_of_permission(call):
    assert confined(call).startswith("PermissionError")


def test_programs_that_it_starts_are_confined_too():
    command = [sys.executable, "-c", "import socket; socket.socket()"]
    told = confined(f"print(subprocess.run({command!r}, capture_output=True, text=True).stderr)")
    assert told.endswith("PermissionError: [Errno 13] Permission denied")


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("print(len(socket.socketpair()))", "2"),
        ("print(subprocess.run(['true']).returncode)", "0"),
        ("child = subprocess.Popen(['sleep', '60']); child.kill(); print(child.wait())", "-9"),
        ("os.kill(os.getpid(), signal.SIGKILL) if not os.fork() else print(os.wait()[1])", "9"),
        ("print(open('/proc/self/oom_score_adj').read())", "500"),
        ("print([line for line in open('/proc/self/status') if 'NoNew' in line])",
         r"['NoNewPrivs:\t1\n']"),
    ],
)  # fmt: skip
def test_what_models_have_need_for_works(then, told):
    assert confined(then) == told


def test_the_network_may_be_allowed():
    assert confined("print(socket.socket().family == socket.AF_INET)", network=True) == "True"


def test_memory_beyond_the_limit_is_an_error_of_memory():
    assert confined("held = bytearray(128 << 20); print(len(held) >> 20)") == "128"
    assert confined("bytearray(512 << 20)") == "MemoryError"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_filter_is_short_and_every_way_through_it_ends(machine):
    """The kernel refuses one that jumps past its end, and one of more than 4,096 instructions."""
    program = filter_program(machine, network=False, spared=[-1, os.getpid()])
    assert len(program) % 8 == 0
    instructions = [program[at : at + 8] for at in range(0, len(program), 8)]
    assert len(instructions) <= 4096
    for at, one in enumerate(instructions):
        code, yes, no = int.from_bytes(one[:2], sys.byteorder), one[2], one[3]
        if code & 7 == 5:
            assert at + 1 + max(yes, no) < len(instructions)
    assert int.from_bytes(instructions[-1][:2], sys.byteorder) == 6
