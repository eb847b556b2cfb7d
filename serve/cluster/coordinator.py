"""What a cluster has on its entry machine: the registry of its servers, and the front it feeds."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from serve.cluster.pool import Pool, PoolKeeper
from serve.cluster.registry import Announcement, Registry, ServerRow
from serve.cluster.replica import state_folder
from serve.cluster.servers_file import write_servers
from serve.cluster.supervised import Supervised
from serve.errors import ConfigError
from serve.files import replace_file

_LOOK_S = 0.1
_END_S = 15.0
#: A front that ended is started again after this.
_RESTART_S = 5.0
#: A deployment that failed is tried again after this.
_DEPLOY_AGAIN_S = 5.0
#: The server of an update that is given up has so long to end; its machine may be lost.
_MOST_END_S = 120.0


class Coordinator:
    """Registry and front of one cluster. Thread-safe.

    Its files outlast it: a coordinator that comes back has its pool, its servers and its front.
    """

    def __init__(self, cluster: str, deploy: Callable[[Pool], None]) -> None:
        """Keep the cluster of this name; `deploy` has its servers be as a pool says."""
        self._folder = state_folder(cluster)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._pool_file = self._folder / "pool.json"
        self._servers_file = self._folder / "servers"
        self._known_file = self._folder / "known.json"
        self._front = Supervised(self._folder / "front")
        self._lock = threading.Lock()
        self._deploy = deploy
        self._keeper: PoolKeeper | None = None
        #: The servers are not as the pool says, by what the keeper decided.
        self._undeployed = self._is_ending = False
        self._next_deploy_s, self._not_deployed = 0.0, ""
        #: An update that was on trial and is given up: its servers end before Serve is told.
        self._given_up: str | None = None
        self._given_up_s = 0.0
        #: What the pool's file holds.
        self._kept: Pool | None = None
        known: list[Announcement] = []
        if self._pool_file.exists():
            pool = msgspec.json.decode(self._pool_file.read_bytes(), type=Pool)
            self._keeper = PoolKeeper(pool, time.monotonic_ns())
            if self._known_file.exists():
                known = msgspec.json.decode(self._known_file.read_bytes(), type=list[Announcement])
        lease_s = 3600.0 if self._keeper is None else self._keeper.pool.spec.lease_s
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
            if self._keeper is not None and self._keeper.pool.endpoint != pool.endpoint:
                self._front.end(_END_S)
            if self._keeper is not None and self._keeper.on_trial != pool.spec.generation:
                self._give_up(self._keeper.on_trial)
            self._keeper = PoolKeeper(pool, time.monotonic_ns())
            self._undeployed, self._not_deployed, self._is_ending = False, "", False
            replace_file(self._pool_file, msgspec.json.encode(pool))
            self._kept = pool

    def pool(self) -> Pool:
        """Return how the cluster is to be."""
        with self._lock:
            if self._keeper is None:
                raise ConfigError("the cluster has not been set up")
            return self._keeper.pool

    def announce(self, said: Announcement) -> bool:
        """See ``Registry.announce``."""
        with self._lock:
            if self._keeper is not None:
                self._keeper.take(said, time.monotonic_ns())
            return self._registry.announce(said, time.monotonic())

    def goes_on(self, generation: str) -> bool | None:
        """See ``PoolKeeper.goes_on``; nothing goes on when the cluster is about to end."""
        with self._lock:
            if self._is_ending:
                return False
            return None if self._keeper is None else self._keeper.goes_on(generation)

    def is_settled(self) -> bool:
        """Return True when no server of an update that was given up is left.

        Serve kills replicas whose constructors have not returned, as those of a trial, and nobody
        would end their servers then.
        """
        with self._lock:
            waited_s = time.monotonic() - self._given_up_s
            return (
                self._given_up is None
                or not self._registry.has(self._given_up)
                or waited_s > _MOST_END_S
            )

    def _give_up(self, update: str | None) -> None:
        """Remember an update that was on trial."""
        if update is not None:
            self._given_up, self._given_up_s = update, time.monotonic()

    def leave_alone(self) -> None:
        """Change nothing by itself any more: the cluster is about to end."""
        with self._lock:
            self._is_ending = True
            if self._keeper is not None:
                self._give_up(self._keeper.on_trial)

    def not_started(self, generation: str, reason: str) -> None:
        """See ``PoolKeeper.not_started``."""
        with self._lock:
            if self._keeper is not None and self._keeper.not_started(generation, reason):
                self._undeployed = True
                self._give_up(generation)

    def trial(self) -> tuple[str, str]:
        """Return how the trial of an update stands, and why the last was taken back; or empty."""
        with self._lock:
            if self._keeper is None:
                return "", ""
            anew = "the servers are being deployed anew" if self._undeployed else ""
            return self._keeper.told or anew, self._keeper.pool.taken_back

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
        """Return what is wrong with the front, or with servers; empty when nothing is."""
        return self._problem or self._not_deployed

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
                known, keeper = self._registry.known(), self._keeper
                if keeper is None:
                    continue
                update = keeper.on_trial
                if not self._is_ending and keeper.change(
                    self._registry.ready_count, time.monotonic_ns()
                ):
                    self._undeployed = True
                    self._give_up(update)
                pool = keeper.pool
                if pool != self._kept:
                    replace_file(self._pool_file, msgspec.json.encode(pool))
                    self._kept = pool
                if known != self._written:
                    replace_file(self._known_file, msgspec.json.encode(known))
                    write_servers(self._servers_file, *self._registry.servers())
                    self._written = known
            self._keep_front(pool)
            due = self._undeployed and not self._is_ending and self.is_settled()
            if due and time.monotonic() >= self._next_deploy_s:
                self._deploy_anew(pool)

    def _deploy_anew(self, pool: Pool) -> None:
        """Have the servers be as the pool says; tried again later when that fails."""
        try:
            self._deploy(pool)
        except Exception as error:
            self._not_deployed = f"the servers were not deployed anew: {error}"
            self._next_deploy_s = time.monotonic() + _DEPLOY_AGAIN_S
            return
        with self._lock:
            self._not_deployed = ""
            # Who changed the pool meanwhile may have deployed it before this did.
            self._undeployed = self._keeper is not None and self._keeper.pool != pool

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
