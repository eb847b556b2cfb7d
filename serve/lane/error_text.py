"""What is told of an error that a model's code raised, which may be anything.

Its text may be longer than a packet, no valid Unicode, or raise itself when it is asked for.
"""

import traceback

from serve.errors import ServeError
from serve.ipc.stop_word import Stopped

#: As many as a client is told at most.
_MOST_CHARS = 1000
_MOST_LOGGED_CHARS = 20_000


def told(error: BaseException) -> str:
    """One text for the client, fit for a packet; of an error that is not ours, its kind first."""
    name = type(error).__name__
    try:
        text = str(error)
    except Stopped:
        raise
    except BaseException as fault:
        return f"{name}, whose text cannot be told: it raises {type(fault).__name__}"
    if not isinstance(error, ServeError):
        text = f"{name}: {text}" if text else name
    return _fit(text, _MOST_CHARS)


def traced(error: BaseException) -> str:
    """The traceback, for the log."""
    return _fit("".join(traceback.format_exception(error)), _MOST_LOGGED_CHARS)


def _fit(text: str, most_chars: int) -> str:
    if len(text) > most_chars:
        text = text[: most_chars - 1] + "…"
    return text.encode("utf-8", "backslashreplace").decode().rstrip()
