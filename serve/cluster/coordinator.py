"""What a cluster has on its entry machine: the registry of its servers, and the front it feeds."""

import dataclasses
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from serve.cluster.pool import Pool
from serve.cluster.registry import Announcement, Registry, SeatGiven, ServerRow, Standing
from serve.cluster.replica import state_folder
from serve.cluster.rollout import Rollout
from serve.cluster.servers_file import write_servers
from serve.cluster.supervised import Supervised
from serve.config import load_config
from serve.config_settings import settings_of
from serve.core.cluster.seats import OwnSeat, Seat, SeatAsked, Seats
from serve.errors import ConfigError
from serve.files import replace_file
from serve.undecodable import UNDECODABLE

_log = logging.getLogger(__name__)
_Kind = TypeVar("_Kind")

_LOOK_S = 0.1
_END_S = 15.0
#: A front that ended is started again after this.
_RESTART_S = 5.0


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
        self._seats_file = self._folder / "seats.json"
        self._front = Supervised(self._folder / "front")
        self._lock = threading.Lock()
        self._deploy = deploy
        self._rollout: Rollout | None = None
        #: What the files hold.
        self._kept: Pool | None = None
        self._written: list[Announcement] | None = None
        #: Who holds which part of graphs that are shared out; None where none is.
        self._seats: Seats | None = None
        self._seated: list[Seat] | None = None
        known: list[Announcement] = []
        pool = _read(self._pool_file, Pool)
        if pool is not None:
            self._rollout = Rollout(pool, time.monotonic_ns())
            known = _read(self._known_file, list[Announcement]) or []
            if pool.parts:
                self._seats = self._known_seats(pool.parts)
        lease_s = 3600.0 if self._rollout is None else self._rollout.pool.spec.lease_s
        self._registry = Registry(lease_s, known, time.monotonic())
        self._problem = ""
        #: Why the files do not say what is known; empty while they do.
        self._unwritten = ""
        self._next_start_s = 0.0
        self._over = threading.Event()
        self._feeder = threading.Thread(target=self._feed, name="feed front", daemon=True)
        self._feeder.start()

    def keep(self, pool: Pool) -> None:
        """Have the cluster be so; a front that listens elsewhere ends."""
        with self._lock:
            now_ns = time.monotonic_ns()
            if self._rollout is None:
                self._rollout = Rollout(pool, now_ns)
            else:
                if self._rollout.pool.endpoint != pool.endpoint:
                    self._front.end(_END_S)
                self._rollout.keep(pool, now_ns)
            if pool.parts and self._seats is None:
                self._seats = self._known_seats(pool.parts)
            self._write(pool)

    def pool(self) -> Pool:
        """Return how the cluster is to be."""
        with self._lock:
            if self._rollout is None:
                raise ConfigError("the cluster has not been set up")
            return self._rollout.pool

    def announce(self, said: Announcement) -> Standing:
        """Take in what a server says, see ``Registry.announce``.

        One that is on trial knows no others: what it cannot do must show.
        """
        with self._lock:
            on_trial = False
            if self._rollout is not None:
                self._rollout.take(said, time.monotonic_ns())
                on_trial = self._rollout.goes_on(said.generation) is None
            drained = self._registry.announce(said, time.monotonic())
            servers = ([], []) if on_trial else self._registry.servers()
            if self._seats is None or said.seat is None:
                return Standing(drained, *servers)
            asked = SeatAsked(said.machine, said.seat.address)
            seated = self._seats.heard(
                said.seat.number, asked, ready=said.ready, now_ns=time.monotonic_ns()
            )
            self._put(self._write_seats)
            return Standing(drained, *servers, self._seats.stores(), seated)

    def take_seat(self, asked: SeatAsked) -> SeatGiven | str:
        """Give a server a part of graphs that are shared out, see ``Seats.take``.

        None is given before it is on the disk: who had the first is known after a loss of power.
        """
        with self._lock:
            if self._seats is None or self._rollout is None:
                return "no graph of the cluster is shared out"
            count = self._rollout.pool.replicas
            found = self._seats.take(asked, count, time.monotonic_ns())
            if isinstance(found, str):
                return found
            if not self._put(self._write_seats):
                return self._unwritten
            part = self._seats.part_of(found.number)
            return SeatGiven(OwnSeat(found.number, part, found.address), self._seats.stores())

    def leave_seat(self, address: str) -> None:
        """See ``Seats.left``."""
        with self._lock:
            if self._seats is not None:
                self._seats.left(address)
                self._put(self._write_seats)

    def goes_on(self, generation: str) -> bool | None:
        """See ``Rollout.goes_on``."""
        with self._lock:
            return None if self._rollout is None else self._rollout.goes_on(generation)

    def is_settled(self) -> bool:
        """See ``Rollout.is_settled``."""
        with self._lock:
            return self._rollout is None or self._rollout.is_settled(
                self._registry.has, time.monotonic_ns()
            )

    def leave_alone(self) -> None:
        """See ``Rollout.leave_alone``."""
        with self._lock:
            if self._rollout is not None:
                self._rollout.leave_alone(time.monotonic_ns())

    def not_started(self, generation: str, reason: str) -> None:
        """See ``PoolKeeper.not_started``."""
        with self._lock:
            if self._rollout is not None:
                self._rollout.not_started(generation, reason, time.monotonic_ns())

    def trial(self) -> tuple[str, str]:
        """Return how the trial of an update stands, and why the last was taken back; or empty."""
        with self._lock:
            if self._rollout is None:
                return "", ""
            return self._rollout.told, self._rollout.pool.taken_back

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
        with self._lock:
            rollout_problem = "" if self._rollout is None else self._rollout.problem
            return self._problem or self._unwritten or rollout_problem

    def end(self) -> None:
        """End the front, and leave no file of the cluster's state."""
        self._over.set()
        self._feeder.join()
        self._front.end(_END_S)
        for file in (self._pool_file, self._servers_file, self._known_file, self._seats_file):
            file.unlink(missing_ok=True)

    def _feed(self) -> None:
        """Write the servers for the front whenever they change, and keep it."""
        while not self._over.wait(_LOOK_S):
            with self._lock:
                self._registry.look(time.monotonic())
                rollout = self._rollout
                if rollout is None:
                    continue
                rollout.change(self._registry.ready_count, time.monotonic_ns())
                pool = rollout.pool
                if self._put(partial(self._write_all, pool)):
                    self._unwritten = ""
            self._keep_front(pool)
            self._deploy_anew(rollout)

    def _write_all(self, pool: Pool) -> None:
        """Have the files say what is known."""
        known = self._registry.known()
        self._write(pool)
        if known != self._written:
            replace_file(self._known_file, msgspec.json.encode(known))
            write_servers(self._servers_file, *self._registry.servers())
            self._written = known
        self._write_seats()

    def _put(self, write: Callable[[], None]) -> bool:
        """Write files; returns False where they cannot be written, and ``_feed`` tries again."""
        try:
            write()
        except OSError as error:
            told = f"{self._folder}: what is known of servers cannot be written: {error.strerror}"
            if told != self._unwritten:
                _log.error("%s", told)
            self._unwritten = told
            return False
        return True

    def _write(self, pool: Pool) -> None:
        if pool != self._kept:
            replace_file(self._pool_file, msgspec.json.encode(pool))
            self._kept = pool

    def _known_seats(self, parts: int) -> Seats:
        known = _read(self._seats_file, list[Seat]) if self._seats_file.exists() else []
        return Seats(parts, known, time.monotonic_ns())

    def _write_seats(self) -> None:
        if self._seats is None:
            return
        known = [dataclasses.replace(seat, until_ns=0) for seat in self._seats.known()]
        if known != self._seated:
            replace_file(self._seats_file, msgspec.json.encode(known))
            self._seated = known

    def _deploy_anew(self, rollout: Rollout) -> None:
        """Have the servers be as the pool says, if that is due."""
        with self._lock:
            pool = rollout.due(self._registry.has, time.monotonic_ns())
        if pool is None:
            return
        problem = ""
        try:
            self._deploy(pool)
        except Exception as error:
            problem = str(error)
        with self._lock:
            if problem:
                rollout.not_deployed(problem, time.monotonic_ns())
            else:
                rollout.deployed(pool)

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
        if (key_file := _key_file(pool)) is not None:
            command += ["--key-file", str(key_file)]
        self._front.start(command, pool.endpoint, pool.spec.lease_s)


def _read(file: Path, kind: type[_Kind]) -> _Kind | None:
    """Return what a file of the cluster's state holds; None where there is none, or no such."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        _log.error("%s is left out: %s", file, error)
        return None


def _key_file(pool: Pool) -> Path | None:
    """Return the file with the front's key; None without, or while nobody knows of it."""
    try:
        config = load_config(Path(pool.spec.config), settings_of({}, pool.spec.settings))
    except ConfigError:
        return None  # the front does without rather than not at all
    file = config.cluster.front_key_file
    return None if file is None else config.path(file)
