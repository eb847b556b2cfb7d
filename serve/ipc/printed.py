"""What a process of the server prints, on its way to the server's log: lines on a pipe.

A line is text as it was printed, unless it begins with `MARK`. Then the rest is a JSON object, a
``Said``: a message of the process's own log, or the name of the model whose lines follow.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress

import msgspec

MARK = b"\x1e"
#: Most characters of a message and of a traceback.
_MOST = 6_000
_formatter = logging.Formatter()


class Said(msgspec.Struct, omit_defaults=True):
    """What follows `MARK`."""

    #: Level of the message; 0: no message, and `model` prints what follows.
    level: int = 0
    #: Name and version of a model, empty for none.
    model: str = ""
    logger: str = ""
    message: str = ""
    #: Traceback of the message's exception.
    exception: str = ""

    def line(self) -> bytes:
        """Return the line, with its end."""
        return MARK + msgspec.json.encode(self) + b"\n"


class PipeHandler(logging.Handler):
    """Writes messages of the log to a pipe, each at once and whole."""

    def __init__(self, fd: int, model: Callable[[], str]) -> None:
        super().__init__()
        self._fd, self._model = fd, model

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message; one that cannot be written is lost."""
        trace = _formatter.formatException(record.exc_info) if record.exc_info else ""
        said = Said(
            level=record.levelno,
            model=self._model(),
            logger=record.name,
            message=record.getMessage()[:_MOST],
            exception=trace[-_MOST:],
        )
        with suppress(OSError):
            os.write(self._fd, said.line())


def log_to_pipe(fd: int, level: int | str, model: Callable[[], str] = str) -> None:
    """Send all logging of this process, and Python's warnings, to a pipe.

    `model` returns the name of the model that the calling thread runs, empty for none.
    """
    logging.basicConfig(handlers=[PipeHandler(fd, model)], level=level, force=True)
    logging.captureWarnings(True)
