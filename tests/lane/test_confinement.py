"""What a confined process may not do any more; each in a process of its own."""

import os
import struct
import subprocess
import sys

import pytest

from serve.ipc.setup import Confinement, FileRules
from serve.lane import confinement
from serve.lane.confinement import filter_program
from tests.processes import PATIENCE_S

CONFINE = """
import os, resource, signal, socket, subprocess, sys
from serve.ipc.setup import Confinement, FileRules
from serve.lane.confinement import confine
assert confine(
    Confinement(
        os.getppid(), network={network}, processes={processes}, memory_bytes=256 << 20,
        file_bytes=1 << 20, files={files},
    )
) == ""
{then}
"""


def confined(
    then: str, *, network: bool = False, processes: bool = False, files: str = "None"
) -> str:
    """Return what the statements print in a confined process, or the last line of its error."""
    code = CONFINE.format(network=network, processes=processes, files=files, then=then)
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
    then = f"print(subprocess.run({command!r}, capture_output=True, text=True).stderr)"
    told = confined(then, processes=True)
    assert told.endswith("PermissionError: [Errno 13] Permission denied")


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("print(len(socket.socketpair()))", "2"),
        ("import threading; threading.Thread(target=print, args=('runs',)).start()", "runs"),
        ("from multiprocessing.pool import ThreadPool; print(ThreadPool(4).map(abs, [-1]))", "[1]"),
        ("print(os.pwrite(os.memfd_create('a'), bytes(1 << 20), 0) >> 20)", "1"),
        ("print(open('/proc/self/oom_score_adj').read())", "500"),
        ("print([line for line in open('/proc/self/status') if 'NoNew' in line])",
         r"['NoNewPrivs:\t1\n']"),
    ],
)  # fmt: skip
def test_what_models_have_need_for_works(then, told):
    assert confined(then) == told


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("print(subprocess.run(['true']).returncode)", "0"),
        ("print(os.waitstatus_to_exitcode(os.system('true')))", "0"),
        ("child = subprocess.Popen(['sleep', '60']); child.kill(); print(child.wait())", "-9"),
        ("os.kill(os.getpid(), signal.SIGKILL) if not os.fork() else print(os.wait()[1])", "9"),
    ],
)
def test_processes_are_started_where_they_may(then, told):
    assert confined(then, processes=True) == told


@pytest.mark.parametrize(
    "call",
    [
        "os.fork()",
        "os.forkpty()",
        "subprocess.run(['true'])",
        "subprocess.run(['true'], preexec_fn=print)",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "__import__('multiprocessing').get_context('fork').Process().start()",
    ],
)
def test_no_process_can_be_started(call):
    assert confined(call).startswith("PermissionError")


@pytest.mark.parametrize("number", [56, 57, 58, 435])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of its calls")
def test_no_process_can_be_started_by_a_call_of_the_kernel(number):
    # SIGCHLD for `clone`; the last gets no arguments at all.
    call = f"ctypes.CDLL(None, use_errno=True).syscall({number}, 17, 0, 0, 0, 0)"
    told = confined(f"import ctypes; print({call}, ctypes.get_errno())")
    assert told == ("-1 38" if number == 435 else "-1 1")


def test_a_file_beyond_the_limit_is_an_error():
    told = confined("os.pwrite(os.memfd_create('a'), b'1', 1 << 20)")
    assert told == "OSError: [Errno 27] File too large"


@pytest.mark.parametrize(
    "deed",
    [
        "os.chmod(path, 0o777)",
        "os.chmod(os.open(path, os.O_RDONLY), 0o777)",
        "os.utime(path, (0, 0))",
        "os.utime(os.open(path, os.O_RDONLY), (0, 0))",
        "os.chown(path, 1, 1)",
        "os.setxattr(path, 'user.a', b'b')",
    ],
)
def test_modes_and_times_of_files_stay_as_they_are(tmp_path, deed):
    """Programs that copy files go on all the same."""
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0o600)
    before = path.stat()
    then = f"path = {str(path)!r}; {deed}; print('done')"
    assert confined(then, files="FileRules(())") == "done"
    assert path.stat() == before
    assert not os.listxattr(path)


def test_a_file_is_made_by_touching_it(tmp_path):
    """Python makes it only where setting its times fails: that may not look like a success."""
    path = tmp_path / "new"
    then = f"import pathlib; pathlib.Path({str(path)!r}).touch(); print('done')"
    assert confined(then, files=f"FileRules((), ({str(tmp_path)!r},))") == "done"
    assert path.is_file()


@pytest.mark.parametrize(("version", "refused"), [(2, True), (3, False)])
def test_files_are_not_cut_off_by_their_path_where_landlock_has_no_rule(
    monkeypatch, version, refused
):
    monkeypatch.setattr(confinement, "landlock_version", lambda: version)
    rules = Confinement(1, network=True, processes=True, memory_bytes=None, files=FileRules(()))
    program = filter_program("x86_64", rules, spared=[-1])
    asks = struct.pack("=HBBI", 0x15, 0, 1, 76) + struct.pack("=HBBI", 6, 0, 0, 0x50001)
    assert (asks in program) == refused


def test_the_network_may_be_allowed():
    assert confined("print(socket.socket().family == socket.AF_INET)", network=True) == "True"


def test_memory_beyond_the_limit_is_an_error_of_memory():
    assert confined("held = bytearray(128 << 20); print(len(held) >> 20)") == "128"
    assert confined("bytearray(512 << 20)") == "MemoryError"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_filter_is_short_and_every_way_through_it_ends(machine):
    """The kernel refuses one that jumps past its end, and one of more than 4,096 instructions."""
    files = FileRules(())
    rules = Confinement(1, network=False, processes=False, memory_bytes=None, files=files)
    program = filter_program(machine, rules, spared=[-1, os.getpid()])
    assert len(program) % 8 == 0
    instructions = [program[at : at + 8] for at in range(0, len(program), 8)]
    assert len(instructions) <= 4096
    for at, one in enumerate(instructions):
        code, yes, no = int.from_bytes(one[:2], sys.byteorder), one[2], one[3]
        if code & 7 == 5:
            assert at + 1 + max(yes, no) < len(instructions)
    assert int.from_bytes(instructions[-1][:2], sys.byteorder) == 6
