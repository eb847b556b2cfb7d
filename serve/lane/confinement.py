"""What lanes may not do to the machine, the network and the server's other processes.

A model is the user's code. What it has no need for is refused by the kernel: a filter of system
calls (seccomp), rules for files (`file_access`), a limit of memory, no capabilities, and no
privileges by programs that it starts. A call that is refused fails with an error of Python's, and
the run with it. None of this can be undone.
"""

import ctypes
import os
import resource
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import AF_UNIX

from serve.ipc.setup import Confinement
from serve.lane.file_access import landlock_version, limit_files

#: Order in which the kernel ends processes when memory is short: lanes, which are restarted, before
#: the server.
_OOM_SCORE = 500

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_PR_CAPBSET_DROP, _CAPABILITY_VERSION_3 = 24, 0x20080522
#: The capability that lanes of root keep: to read what root reads.
_READS_ALL = 2
_NO_ERROR, _EPERM, _EACCES, _ENOSYS = 0, 1, 13, 38
#: The version of Landlock that has rules for `truncate`.
_CUTS_SINCE = 3
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Calls:
    """Numbers of a machine's system calls."""

    #: The kernel's name of the machine, see linux/audit.h.
    audit: int
    socket: int
    #: Connects a socket, also to one with the path of a file.
    connect: int
    #: Makes a thread or a process as its first argument says; its successor cannot be filtered.
    clone: int
    clone3: int
    #: Those that make processes only.
    forking: tuple[int, ...]
    #: Those that signal the process or group of their first argument.
    signalling: tuple[int, ...]
    #: Those that change modes, owners, times and attributes of files, for which Landlock has no
    #: rules.
    marking: tuple[int, ...]
    #: Sets times of a file: to now without any in its third argument.
    utimensat: int
    #: Cuts a file off by its path, for which Landlock has rules since version 3.
    truncate: int
    refused: tuple[int, ...]


_CALLS = {
    "x86_64": _Calls(
        audit=0xC000003E, socket=41, connect=42, clone=56, clone3=435, forking=(57, 58),
        signalling=(62, 200, 234, 129, 297),
        marking=(
            90, 91, 268, 452, 92, 93, 94, 260, 132, 235, 261, 280,
            188, 189, 190, 197, 198, 199, 463, 466,
        ),
        utimensat=280,
        truncate=76,
        # Others' memory and files: ptrace, process_vm_*, pidfd_send_signal, pidfd_getfd.
        refused=(
            101, 310, 311, 424, 438,
            # Mounts, namespaces and roots.
            165, 166, 155, 161, 272, 308, 428, 429, 430, 432, 433, 304,
            # The machine: swap, names, ports, modules, clocks, accounts, keys, kexec, reboot.
            167, 168, 169, 170, 171, 172, 173, 175, 176, 313, 246, 320, 159, 164, 227, 305, 163,
            179, 248, 249, 250,
            # Ways around a filter, and into the kernel: io_uring, bpf, perf, userfaultfd.
            425, 321, 298, 323,
        ),
    ),
    "aarch64": _Calls(
        audit=0xC00000B7, socket=198, connect=203, clone=220, clone3=435, forking=(),
        signalling=(129, 130, 131, 138, 240),
        marking=(52, 53, 452, 54, 55, 88, 5, 6, 7, 14, 15, 16, 463, 466),
        utimensat=88,
        truncate=45,
        refused=(
            117, 270, 271, 424, 438,
            40, 39, 41, 51, 97, 268, 428, 429, 430, 432, 433, 265,
            224, 225, 142, 161, 162, 105, 106, 273, 104, 294, 171, 170, 112, 266, 89,
            60, 217, 218, 219,
            425, 280, 241, 282,
        ),
    ),
}  # fmt: skip
#: Calls of the x32 interface have this bit.
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_CLONE_THREAD = 0x10000
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
#: Offsets in the kernel's struct seccomp_data.
_NUMBER, _AUDIT, _FIRST_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 32


def confine(rules: Confinement) -> str:
    """Confine this process for good; returns what the system does not support, "" for nothing."""
    with suppress(OSError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(max(int(score.read_text()), _OOM_SCORE)))
    if rules.memory_bytes is not None:
        limit_memory(rules.memory_bytes)
    if rules.file_bytes is not None:
        # Python is refused with an error: it ignores the signal.
        resource.setrlimit(resource.RLIMIT_FSIZE, (rules.file_bytes, rules.file_bytes))
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return "the kernel has no no_new_privs"
    _drop_capabilities()
    lacks = ""
    if rules.files is not None:
        own = tempfile.gettempdir()
        lacks = limit_files(rules.files.hidden, (own, *rules.files.writable))
    machine = os.uname().machine
    if machine not in _CALLS:
        return _told(lacks, f"no filter of system calls for {machine}")
    protected = [rules.server_pid, os.getppid()]
    # As processes, as their groups, and as part of everybody.
    spared = [-1, *protected, *(-os.getpgid(pid) for pid in protected)]
    if failure := _install(filter_program(machine, rules, spared)):
        return _told(lacks, f"the kernel takes no filter of system calls ({failure})")
    return lacks


def _told(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _drop_capabilities() -> None:
    """Give up what root may do beyond others, but to read all files."""
    number = 0
    while number == _READS_ALL or not _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
        number += 1
    # Two words each of effective, permitted and inheritable ones; only what is held may be asked.
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    held = ctypes.create_string_buffer(24)
    if not _libc.capget(header, held):
        _, permitted, *_ = struct.unpack("=6I", held.raw)
        kept = permitted & 1 << _READS_ALL
        _libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def limit_memory(more_bytes: int) -> None:
    """Let this process take `more_bytes` of private memory beyond what it has now.

    Python then raises MemoryError, as torch raises its own error.
    """
    now_bytes = 0
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith("VmData:"):
            now_bytes = int(line.split()[1]) * 1024
    _, most_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = now_bytes + more_bytes
    if most_bytes != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, most_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def filter_program(machine: str, rules: Confinement, spared: list[int]) -> bytes:
    """Return the filter as instructions of classic BPF.

    It lets everything pass but the refused calls, signals to the processes and groups of `spared`,
    without `rules.network` sockets other than Unix ones, and connecting these to anybody's,
    without `rules.processes` the making of processes, and with `rules.files` what Landlock has no
    rules for: modes and times of files stay as they are, though the call succeeds, as programs that
    copy files want.
    """
    calls = _CALLS[machine]
    program: list[tuple[int, int, int, int]] = []

    def refuse_if(value: int, error: int, test: int = _EQUAL) -> None:
        program.append((test, 0, 1, value & 0xFFFFFFFF))
        program.append((_RETURN, 0, 0, _ERROR | error))

    def where(value: int, block: list[tuple[int, int, int, int]]) -> None:
        program.append((_EQUAL, 0, len(block), value))
        program.extend(block)

    allow = (_RETURN, 0, 0, _ALLOW)
    program.append((_LOAD, 0, 0, _AUDIT))
    program.append((_EQUAL, 1, 0, calls.audit))
    program.append((_RETURN, 0, 0, _ERROR | _EPERM))
    program.append((_LOAD, 0, 0, _NUMBER))
    refuse_if(_X32, _EPERM, _AT_LEAST)
    for number in calls.refused:
        refuse_if(number, _EPERM)
    if rules.files is not None:
        # Python's `Path.touch` makes the file only where this fails.
        where(
            calls.utimensat,
            [
                (_LOAD, 0, 0, _THIRD_ARGUMENT),
                (_EQUAL, 0, 3, 0),
                (_LOAD, 0, 0, _THIRD_ARGUMENT + 4),
                (_EQUAL, 0, 1, 0),
                (_RETURN, 0, 0, _ERROR | _EPERM),
                (_RETURN, 0, 0, _ERROR | _NO_ERROR),
            ],
        )
        for number in calls.marking:
            refuse_if(number, _NO_ERROR)
        if landlock_version() < _CUTS_SINCE:
            refuse_if(calls.truncate, _EPERM)
    if not rules.network:
        refuse_if(calls.connect, _EACCES)
        where(
            calls.socket,
            [
                (_LOAD, 0, 0, _FIRST_ARGUMENT),
                (_EQUAL, 0, 1, AF_UNIX),
                allow,
                (_RETURN, 0, 0, _ERROR | _EACCES),
            ],
        )
    if not rules.processes:
        for number in calls.forking:
            refuse_if(number, _EPERM)
        # Its flags are in memory, which a filter cannot read; the C library then takes `clone`.
        refuse_if(calls.clone3, _ENOSYS)
        where(
            calls.clone,
            [
                (_LOAD, 0, 0, _FIRST_ARGUMENT),
                (_ANY_BIT, 0, 1, _CLONE_THREAD),
                allow,
                (_RETURN, 0, 0, _ERROR | _EPERM),
            ],
        )
    targets = [target & 0xFFFFFFFF for target in spared]
    for number in calls.signalling:
        checks = [(_LOAD, 0, 0, _FIRST_ARGUMENT)]
        for target in targets:
            checks += [(_EQUAL, 0, 1, target), (_RETURN, 0, 0, _ERROR | _EPERM)]
        where(number, [*checks, allow])
    program.append(allow)
    return b"".join(struct.pack("=HBBI", *one) for one in program)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def _install(program: bytes) -> str:
    """Install the filter for this thread and its children; returns the error, "" for none."""
    instructions = ctypes.create_string_buffer(program, len(program))
    wanted = _Program(len(program) // 8, ctypes.addressof(instructions))
    if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(wanted), 0, 0):
        return os.strerror(ctypes.get_errno())
    return ""
