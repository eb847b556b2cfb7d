"""Texts for errors that a model's code raised, which may be any exception.

Its message may be longer than a packet, invalid Unicode, or raise an error itself.
"""

import traceback

from serve.errors import ServeError
from serve.ipc.stop_word import Stopped

#: Upper bound of the text for a client.
_MOST_CHARS = 1000
_MOST_LOGGED_CHARS = 20_000


def told(error: BaseException) -> str:
    """Return a text for the client that fits a packet.

    The text of an error that is not a ServeError begins with its type.
    """
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
    """Return the traceback, for the log."""
    return _fit("".join(traceback.format_exception(error)), _MOST_LOGGED_CHARS)


def _fit(text: str, most_chars: int) -> str:
    if len(text) > most_chars:
        text = text[: most_chars - 1] + "…"
    return text.encode("utf-8", "backslashreplace").decode().rstrip()
