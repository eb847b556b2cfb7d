"""The signals that a server acts on, and those it ignores; its other processes ignore all."""

import signal

#: The server answers accepted requests, then ends.
DRAINING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
#: The server's terminal has closed: it drains. Without a terminal it reads its files again.
HANGUP = signal.SIGHUP
#: Their default action would end the process at once.
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
#: All of them, which the server's other processes ignore.
LEFT_TO_MAIN = (*DRAINING, HANGUP, *IGNORED)
