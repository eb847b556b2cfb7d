"""A server's own copies of the files that it serves a version from: its weights and its code.

A lane that is started anew reads them long after the version was loaded, when the files of the
repository may have been overwritten or cut. The copies lie in memory, sealed, without a name, and
end with the server; lanes share their pages. So no disk can be full, nobody else can change them
or leave them behind, and two servers do not meet.
"""

import fcntl
import os
from pathlib import Path

import msgspec

from serve.errors import ConfigError, NotReady
from serve.files import open_regular
from serve.models.repository import ModelSpec
from serve.models.weights_file import check_weights

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class OwnFiles:
    """Copies for one version, kept until `close`."""

    def __init__(self, spec: ModelSpec) -> None:
        """Copy what `spec` names.

        Raises ConfigError when a file is not what it was when the repository was read, and
        NotReady when one is being written to or there is no memory.
        """
        self._fds: list[int] = []
        try:
            weights = self._copy(Path(spec.weights))
            check_weights(Path(weights), told_as=Path(spec.weights))
            if os.stat(weights).st_size != spec.weights_bytes:
                raise NotReady(f"{spec.weights}: was replaced meanwhile; load the model again")
            source = spec.source_file
            #: Reads from the copies.
            self.spec = msgspec.structs.replace(
                spec, own_weights=weights, own_source="" if source is None else self._copy(source)
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the copies go; what lanes have mapped stays. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _copy(self, path: Path) -> str:
        """Where processes of this server find a sealed copy of the file."""
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


def _stamp(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_size, facts.st_mtime_ns
