"""A server's copies of the files it serves a version from: weights and source code.

A lane that restarts reads them long after the version was loaded, when the files of the repository
may have been overwritten or cut. The copies are sealed memory files without a name: nobody can
change them, they need no disk, they end with the server, and lanes share their pages.
"""

import fcntl
import os
from pathlib import Path

import msgspec

from serve.errors import ConfigError, NotReady
from serve.files import open_regular
from serve.models.repository import ModelSpec
from serve.models.weights_file import check_weights, nonfinite_weights

#: Most names of weights that are told.
_MOST_NAMES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class SealedCopies:
    """The copies for one version, kept until `close`."""

    def __init__(self, spec: ModelSpec) -> None:
        """Copy the files that `spec` names.

        Raises ConfigError when a file is gone or no longer valid, and NotReady when one is being
        written to or memory is short.
        """
        self._fds: list[int] = []
        try:
            weights = self._copy(Path(spec.weights))
            check_weights(Path(weights), told_as=Path(spec.weights))
            if os.stat(weights).st_size != spec.weights_bytes:
                raise NotReady(
                    f"{spec.weights}: was replaced after it was checked; load the model again"
                )
            source = spec.source_file
            #: The spec with the paths of the copies.
            self.spec = msgspec.structs.replace(
                spec,
                copied_weights=weights,
                nonfinite_weights=nonfinite_weights(Path(weights))[:_MOST_NAMES],
                copied_source="" if source is None else self._copy(source),
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the copies; lanes keep what they have mapped. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _copy(self, path: Path) -> str:
        """Return this process's path of a sealed copy of the file, see ``ipc.passing``."""
        try:
            copy_fd = os.memfd_create("gnnserve-model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._fds.append(copy_fd)
            with open_regular(path) as file:
                before = os.fstat(file.fileno())
                left_bytes = before.st_size
                while left_bytes > 0:
                    sent_bytes = os.sendfile(copy_fd, file.fileno(), None, left_bytes)
                    if sent_bytes == 0:
                        break
                    left_bytes -= sent_bytes
                after = os.fstat(file.fileno())
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except OSError as error:
            raise NotReady(f"{path}: cannot be copied: {error.strerror}") from error
        if left_bytes or _stamp(before) != _stamp(after):
            raise NotReady(f"{path}: was written to while it was read; load the model again")
        fcntl.fcntl(copy_fd, fcntl.F_ADD_SEALS, _SEALS)
        return f"/proc/{os.getpid()}/fd/{copy_fd}"


def _stamp(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns
