"""Imported once by the fork server that all lanes are forked from: torch, PyG, all a lane needs.

Service managers send SIGTERM to every process of a service. Only the main process acts on it:
lanes and their fork server must live until what was accepted is answered.
"""

import signal

# PyG comes with it. Importing that takes a second, which a restarted lane would pay again.
from serve.models import zoo as zoo
from serve.runtime import lane as lane

signal.signal(signal.SIGTERM, signal.SIG_IGN)
