"""How far a thread steps back from the processor for others."""

import os
from contextlib import suppress

#: Beyond every niceness (0 to 19): the kernel's idle class. Such a thread runs where nobody else
#: would, and one that wakes takes its core at once.
IDLE_CLASS = 20


def be_nice(niceness: int) -> None:
    """Add `niceness` to that of the calling thread, and of those it starts from now on.

    `IDLE_CLASS` gives the idle class; a system that does not allow it gives niceness 19, which is
    nearest.
    """
    with suppress(OSError):
        os.nice(min(niceness, IDLE_CLASS - 1))
    if niceness == IDLE_CLASS:
        # Linux keeps it by thread; 0 is the calling one.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
