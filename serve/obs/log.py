"""Logging on standard error: text lines on a terminal, JSON lines elsewhere.

A message about one request carries its id: ``log.info("…", extra={"request_uid": uid})``. Standard
output is reserved for the results of commands.
"""

import logging
import sys
import threading
import time
from functools import lru_cache
from typing import Any, Literal, TextIO

import msgspec

from serve.files import printable
from serve.threads import Thread

_log = logging.getLogger(__name__)

LogFormat = Literal["auto", "text", "json"]

#: Attributes of every LogRecord; all others came through `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup_logging(
    form: LogFormat = "auto", level: str = "INFO", stream: TextIO | None = None
) -> None:
    """Send all logging of the process to one stream, replacing earlier handlers.

    Args:
        form: Format of a line; `auto` is text on a terminal and JSON elsewhere.
        level: Lowest level that is logged.
        stream: Target; None for standard error.
    """
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    handler.setFormatter(_formatter(form, target))
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.captureWarnings(True)


def change_logging(form: LogFormat, level: str) -> None:
    """Write further lines in another form and from another level on, see ``setup_logging``.

    No line is lost meanwhile.
    """
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setFormatter(_formatter(form, handler.stream))
    root.setLevel(level)


def _formatter(form: LogFormat, stream: TextIO) -> logging.Formatter:
    as_json = form == "json" or (form == "auto" and not stream.isatty())
    return JsonFormatter() if as_json else TextFormatter()


def log_uncaught() -> None:
    """Log exceptions that nothing catches, which Python would print as text."""

    def of_process(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _log.critical("an error ended the process", exc_info=(kind, error, trace))

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            name = "a thread" if args.thread is None else f"thread '{args.thread.name}'"
            trace = (args.exc_type, args.exc_value, args.exc_traceback)
            _log.error("an error ended %s", name, exc_info=trace)

    def of_nothing(args: Any) -> None:
        if isinstance(thread := getattr(args.object, "__self__", None), Thread):
            thread.miss()
        trace = (args.exc_type, args.exc_value, args.exc_traceback)
        what = args.err_msg or "Exception ignored in"
        _log.error("%s: %r", what, args.object, exc_info=trace)

    sys.excepthook, threading.excepthook, sys.unraisablehook = of_process, of_thread, of_nothing


def extras(record: logging.LogRecord) -> dict[str, object]:
    """Return what the caller passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def rfc3339(unix_s: float) -> str:
    """Return a time as `2026-01-31T12:00:01.234Z`."""
    seconds, millis = divmod(int(unix_s * 1000), 1000)
    return f"{_to_the_second(seconds)}.{millis:03d}Z"


@lru_cache(maxsize=16)
def _to_the_second(unix_s: int) -> str:
    """Return a time without its end; many lines have the same."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))


class JsonFormatter(logging.Formatter):
    """Formats a JSON object per line: time (RFC 3339, UTC), level, logger, message, extras."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end."""
        fields: dict[str, object] = {
            "time": rfc3339(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **extras(record),
        }
        if trace := _trace_of(self, record):
            fields["exception"] = trace
        try:
            return msgspec.json.encode(fields, enc_hook=str).decode()
        except UnicodeEncodeError:  # of half a character, as the names of files may be
            return msgspec.json.encode(_printable(fields), enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """Formats `12:00:01.234 WARNING serve.obs.store: message  [request_uid=…]`, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname:<7} "
            f"{record.name}: {record.getMessage()}"
        )
        facts = " ".join(f"{name}={value}" for name, value in extras(record).items())
        if facts:
            line += f"  [{facts}]"
        if trace := _trace_of(self, record):
            line += "\n" + trace
        return line


def _printable(value: object) -> object:
    """Return `value` with the text in it as UTF-8 can have it."""
    if isinstance(value, dict):
        return {_printable(name): _printable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def _trace_of(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    """Return the traceback of a message, which may be one of another process."""
    return formatter.formatException(record.exc_info) if record.exc_info else record.exc_text
