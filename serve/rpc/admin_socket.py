"""The admin socket: a Unix socket on which whoever may open its file administers the server."""

import os
import socket
import stat
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

import grpc

from serve.access.admin_path import make_socket_folder, require_short, socket_name
from serve.errors import ConfigError
from serve.rpc.guard import Guard
from serve.rpc.refusals import Refusals

_PROBE_S = 1.0


class AdminSocket:
    """gRPC server on a Unix socket of mode 0600, from `start` to `stop`."""

    def __init__(
        self,
        path: Path | None,
        threads: Executor,
        handlers: Sequence[grpc.GenericRpcHandler],
        options: list[tuple[str, int]],
        refusals: Refusals,
    ) -> None:
        """Prepare without listening.

        Args:
            path: The socket's file; None: one that the commands of this host find by the gRPC port.
            threads: Threads for calls.
            handlers: The services.
            options: Options of gRPC.
            refusals: Counts refused calls.
        """
        self._path = path
        #: True while the socket's file is this server's.
        self._bound = False
        self._server = grpc.server(
            threads,  # type: ignore[arg-type]  # gRPC needs an Executor, no thread pool
            handlers=list(handlers),
            interceptors=[Guard(None, refusals)],
            options=options,
        )

    @property
    def path(self) -> Path | None:
        """The socket's file; None before `start` for one that is found by the port."""
        return self._path

    def start(self, grpc_port: int) -> None:
        """Listen and serve; raises ConfigError when the socket cannot be made."""
        path = self._path = self._path or make_socket_folder() / socket_name(grpc_port)
        require_short(path)
        _remove_left_behind(path)
        # From its first moment nobody else may open it.
        mask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise ConfigError(f"server.admin_socket: cannot listen on {path}: {error}") from error
        finally:
            os.umask(mask)
        self._bound = True
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Close the socket, and remove its file if this server made it. Idempotent."""
        self._server.stop(grace_s).wait()
        if self._bound and self._path is not None:
            self._path.unlink(missing_ok=True)
            self._bound = False


def _remove_left_behind(path: Path) -> None:
    """Remove the socket of a server that was killed; raises ConfigError for any other file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"server.admin_socket: {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"server.admin_socket: {path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"server.admin_socket: {path}: {error.strerror}") from error
    raise ConfigError(f"server.admin_socket: another server listens on {path}")
