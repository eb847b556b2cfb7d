"""What models print: sent to the server's log by pipes, with the name of the model.

Python's streams name the model before its first line in a run, so that a run that prints nothing
costs nothing. What compiled code prints has the name where Python printed before it in the same
run, and while models load.
"""

import io
import os
import sys
import threading
from contextlib import suppress

from serve.ipc.printed import Said, log_to_pipe
from serve.ipc.setup import PassedFile

#: The model that each thread runs.
_here = threading.local()


class ModelStream(io.TextIOWrapper):
    """Standard output or error of a lane's process."""

    def __init__(self, fd: int) -> None:
        """Write to `fd`, line by line."""
        super().__init__(
            io.BufferedWriter(io.FileIO(fd, "wb", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        self._named = ""

    def write(self, text: str) -> int:
        """Write text, after the name of the model that prints it."""
        self.name_model(_model_here())
        return super().write(text)

    def name_model(self, model: str) -> None:
        """Write the name of the model whose lines follow, unless it was written last."""
        if model == self._named:
            return
        self._named = model
        with suppress(OSError, ValueError):  # a model may close the stream
            self.flush()
            self.buffer.write(Said(model=model).line())
            self.buffer.flush()


_streams: tuple[ModelStream, ...] = ()


def redirect(files: tuple[PassedFile, PassedFile], log_level: int) -> None:
    """Send standard output, standard error and the log of this process to two pipes."""
    global _streams
    for fd, file in enumerate(files, 1):
        pipe = file.detach()
        os.dup2(pipe, fd)
        os.close(pipe)
    _streams = ModelStream(1), ModelStream(2)
    sys.stdout, sys.stderr = _streams
    log_to_pipe(2, log_level, _model_here)


def begin_model(key: str, *, at_once: bool = False) -> None:
    """Name what this thread prints by a model from now on.

    With `at_once`, also what compiled code prints before Python does.
    """
    # Whatever follows tells apart what one version was loaded from.
    _here.model = key.partition("@")[0]
    if at_once:
        for stream in _streams:
            stream.name_model(_here.model)


def _model_here() -> str:
    return getattr(_here, "model", "")


def end_model() -> None:
    """Have this thread's lines belong to no model any more."""
    _here.model = ""
    for stream in _streams:
        stream.name_model("")
