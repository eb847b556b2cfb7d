"""Imported once by the fork server that all lanes are forked from: torch and all a lane needs.

Service managers send SIGTERM to every process of a service. Only the main process acts on it:
lanes and their fork server must live until what was accepted is answered.
"""

import signal

from serve.models import zoo as zoo
from serve.runtime import lane as lane

signal.signal(signal.SIGTERM, signal.SIG_IGN)
