"""The signals that a server acts on, and those it ignores; its other processes ignore all."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

#: The server answers accepted requests, then ends.
DRAINING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
#: The server's terminal has closed: it drains. Without a terminal it reads its files again.
HANGUP = signal.SIGHUP
#: Their default action would end the process at once.
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
#: All of them, which the server's other processes ignore.
LEFT_TO_MAIN = (*DRAINING, HANGUP, *IGNORED)


@contextmanager
def left_to_main_blocked() -> Iterator[None]:
    """Block `LEFT_TO_MAIN` in this thread, and in processes that it starts until they ignore them.

    Ctrl-C would otherwise end these while they import. What was blocked before stays blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_MAIN)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_left_to_main() -> None:
    """Ignore `LEFT_TO_MAIN`, blocked until now or not."""
    for number in LEFT_TO_MAIN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_MAIN)
