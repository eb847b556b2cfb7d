"""The signals that have a server stop, and those it ignores; its lanes leave them all to it."""

import signal

#: What was accepted is answered, then the server ends. SIGHUP is what a closed terminal sends.
DRAINING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: Otherwise they would end the process at once.
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
