"""What the lanes of each trust domain may do, as the configuration says."""

import os
from collections.abc import Iterator

from serve.config import Config
from serve.ipc.setup import Confinement, FileRules
from serve.models.repository import folders_of_others
from serve.payloads import beside
from serve.scratch import servers_folder

#: Files that SQLite puts beside a database.
_BESIDE_DATABASE = ("", "-wal", "-shm", "-journal")


class Confining:
    """Makes the rules for each lane process when it starts."""

    def __init__(self, config: Config, memory_bytes: int) -> None:
        """`memory_bytes` is private memory that a lane may take beyond what it starts with."""
        self._config = config
        self._memory_bytes = memory_bytes

    def __call__(self, domain: str) -> Confinement:
        """Return the rules for models of the trust domain, as the repository is now."""
        device = self._config.device
        files = None
        if device.lane_files == "limited":
            folders = (str(self._config.path(one)) for one in device.lane_writes)
            files = FileRules(hidden=tuple(self._hidden(domain)), writable=tuple(folders))
        return Confinement(
            server_pid=os.getpid(),
            network=device.lane_network == "on",
            processes=device.lane_processes == "on",
            memory_bytes=self._memory_bytes,
            files=files,
            # Of folders that models may write to, nothing is known.
            file_bytes=None if device.lane_writes else device.max_lane_files_bytes,
        )

    def _hidden(self, domain: str) -> Iterator[str]:
        """Yield what only the server, or only another trust domain, needs."""
        config = self._config
        if config.file is not None:
            yield str(config.file)
        tls, report = config.server.tls, config.report
        secrets = (tls.certificate, tls.key, tls.client_ca, config.auth.tokens_file)
        logs = report.journal, report.access_log, report.record
        for name in (*secrets, config.server.admin_socket, *logs):
            if name is not None:
                yield str(config.path(name))
        if report.record is not None:
            yield str(beside(config.path(report.record)))
        for suffix in _BESIDE_DATABASE:
            yield f"{config.path(report.database)}{suffix}"
        yield str(config.path(config.training.folder))
        yield from map(str, folders_of_others(config.path(config.models.repository), domain))
        # A lane gets its own folder in it, and none of other lanes'.
        if (folder := servers_folder()) is not None:
            yield str(folder)
