"""Memory that a process shares with no other, as the kernel counts it."""

import mmap


def private_bytes() -> int:
    """Resident memory of this process that it shares with no other."""
    with open("/proc/self/statm", "rb") as file:
        return bytes_in(file.read())


def private_bytes_of(pid: int) -> int | None:
    """The same of another process, with what it has from the one it was forked from.

    None when it is gone.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return bytes_in(file.read())
    except (OSError, ValueError):
        return None


def bytes_in(statm: bytes) -> int:
    """The same by the content of a process's `statm`."""
    _, resident, shared, *_ = statm.split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE
