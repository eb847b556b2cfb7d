"""Private memory of a process: resident pages that it shares with no other."""

import mmap


def private_bytes() -> int:
    """Return the private memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return parse_statm(file.read())


def private_bytes_of(pid: int) -> int | None:
    """Return the private memory of another process; None when the process is gone.

    Pages inherited from the process it was forked from count as private.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return parse_statm(file.read())
    except (OSError, ValueError):
        return None


def parse_statm(statm: bytes) -> int:
    """Return the private bytes that the content of `/proc/PID/statm` tells."""
    _, resident, shared, *_ = statm.split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE
