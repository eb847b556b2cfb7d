"""The kernel's account of a process without its children: processor time and hand-overs."""

from pathlib import Path


def processor_ns(pid: int) -> int:
    """Return the time that the threads of the process have had on processors."""
    return sum(int(text.split()[0]) for text in _of_threads(pid, "schedstat"))


def handovers(pid: int) -> int:
    """Return how often threads of the process gave up their core to wait."""
    waits = (
        text.rpartition("\nvoluntary_ctxt_switches:")[2] for text in _of_threads(pid, "status")
    )
    return sum(int(text.split()[0]) for text in waits)


def _of_threads(pid: int, name: str) -> list[str]:
    """Return that file of every thread."""
    texts = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            texts.append((thread / name).read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return texts
