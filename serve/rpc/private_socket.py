"""A Unix socket that this user alone can reach."""

import os
import tempfile
from pathlib import Path

from serve.files import remove_tree

#: A socket's path has at most 107 bytes, of which some 30 come after the temporary folder.
_LONGEST_FOLDER = 75


class PrivateSocket:
    """Path of a socket, in a folder of its own that nobody else may enter, until `close`."""

    def __init__(self) -> None:
        """Make the folder; raises OSError."""
        folders = tempfile.gettempdir(), "/tmp"
        fits = [one for one in folders if len(os.fsencode(one)) <= _LONGEST_FOLDER]
        self._folder = Path(tempfile.mkdtemp(prefix="gnnserve-rpc-", dir=fits[0]))
        self.path = self._folder / "grpc"

    @property
    def address(self) -> str:
        """Its address, as gRPC writes it."""
        return f"unix:{self.path}"

    def close(self) -> None:
        """Remove the socket and its folder. Idempotent."""
        remove_tree(self._folder)
