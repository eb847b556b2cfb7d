"""The signals that stop a server, and those it ignores; lanes ignore all of them."""

import signal

#: The server answers accepted requests, then ends. A terminal that closes sends SIGHUP.
DRAINING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: Their default action would end the process at once.
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
