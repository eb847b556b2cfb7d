"""What a cluster has on its entry machine: the registry of its servers, and the front it feeds."""

import subprocess
import sys
import threading
import time

import msgspec

from serve.cluster.registry import Announcement, Registry, ServerRow
from serve.cluster.replica import ReplicaSpec, state_folder
from serve.cluster.servers_file import write_servers
from serve.cluster.supervised import Supervised
from serve.errors import ConfigError
from serve.files import replace_file

_LOOK_S = 0.1
_END_S = 15.0
#: A front that ended is started again after this.
_RESTART_S = 5.0


class Pool(msgspec.Struct, frozen=True):
    """How a cluster is to be."""

    spec: ReplicaSpec
    #: Servers, each on a machine of its own.
    replicas: int
    #: Where the front listens.
    host: str
    port: int
    #: Cores and GPUs that a machine has to have free for a server.
    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def endpoint(self) -> str:
        """`host:port` of the front."""
        return f"{self.host}:{self.port}"


class Coordinator:
    """Registry and front of one cluster. Thread-safe.

    Its files outlast it: a coordinator that comes back has its pool, its servers and its front.
    """

    def __init__(self, cluster: str) -> None:
        self._folder = state_folder(cluster)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._pool_file = self._folder / "pool.json"
        self._servers_file = self._folder / "servers"
        self._known_file = self._folder / "known.json"
        self._front = Supervised(self._folder / "front")
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        known: list[Announcement] = []
        if self._pool_file.exists():
            self._pool = msgspec.json.decode(self._pool_file.read_bytes(), type=Pool)
            if self._known_file.exists():
                known = msgspec.json.decode(self._known_file.read_bytes(), type=list[Announcement])
        lease_s = 3600.0 if self._pool is None else self._pool.spec.lease_s
        self._registry = Registry(lease_s, known, time.monotonic())
        self._written: object = None
        self._problem = ""
        self._next_start_s = 0.0
        self._over = threading.Event()
        self._feeder = threading.Thread(target=self._feed, name="feed front", daemon=True)
        self._feeder.start()

    def keep(self, pool: Pool) -> None:
        """Have the cluster be so; a front that listens elsewhere ends."""
        with self._lock:
            if self._pool is not None and self._pool.endpoint != pool.endpoint:
                self._front.end(_END_S)
            self._pool = pool
            replace_file(self._pool_file, msgspec.json.encode(pool))

    def pool(self) -> Pool:
        """Return how the cluster is to be."""
        with self._lock:
            if self._pool is None:
                raise ConfigError("the cluster has not been set up")
            return self._pool

    def announce(self, said: Announcement) -> bool:
        """See ``Registry.announce``."""
        with self._lock:
            return self._registry.announce(said, time.monotonic())

    def left(self, address: str, incarnation: int) -> None:
        """See ``Registry.left``."""
        with self._lock:
            self._registry.left(address, incarnation)

    def drain(self, name: str, *, back: bool = False) -> list[str]:
        """See ``Registry.drain``."""
        with self._lock:
            return self._registry.drain(name, back=back)

    def rows(self) -> list[ServerRow]:
        """See ``Registry.rows``."""
        with self._lock:
            return self._registry.rows()

    def problem(self) -> str:
        """Return what is wrong with the front; empty when nothing is."""
        return self._problem

    def end(self) -> None:
        """End the front, and leave no file of the cluster's state."""
        self._over.set()
        self._feeder.join()
        self._front.end(_END_S)
        for file in (self._pool_file, self._servers_file, self._known_file):
            file.unlink(missing_ok=True)

    def _feed(self) -> None:
        """Write the servers for the front whenever they change, and keep it."""
        while not self._over.wait(_LOOK_S):
            with self._lock:
                self._registry.look(time.monotonic())
                known, pool = self._registry.known(), self._pool
                if pool is None:
                    continue
                if known != self._written:
                    replace_file(self._known_file, msgspec.json.encode(known))
                    write_servers(self._servers_file, *self._registry.servers())
                    self._written = known
            self._keep_front(pool)

    def _keep_front(self, pool: Pool) -> None:
        if self._front.pid is not None:
            self._front.renew()
            self._problem = ""
        elif time.monotonic() >= self._next_start_s:
            if self._next_start_s:
                self._problem = f"the front ended: {self._front.said().strip()}"
            self._next_start_s = time.monotonic() + _RESTART_S
            try:
                self._start_front(pool)
            except (OSError, subprocess.SubprocessError) as error:
                self._problem = f"the front did not start: {error}"

    def _start_front(self, pool: Pool) -> None:
        command = [
            sys.executable, "-P", "-m", "gnnserve", "front", "--host", pool.host,
            "--port", str(pool.port), "--servers-file", str(self._servers_file),
        ]  # fmt: skip
        self._front.start(command, pool.endpoint, pool.spec.lease_s)
