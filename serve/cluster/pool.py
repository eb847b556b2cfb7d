"""How a cluster is to be, and what changes that by itself: trials of updates, and load."""

from hashlib import sha256
from pathlib import Path

import msgspec

from serve.cluster.registry import Announcement
from serve.cluster.replica import ReplicaSpec
from serve.core.cluster.scaling import Scaler, ServerCounts
from serve.core.cluster.trial import Trial
from serve.core.versions.comparison import Ends
from serve.errors import ConfigError

#: A server that is started serves after about so long, its calibration known.
START_NS = 20_000_000_000
#: Longest trial of an update.
MOST_TRIAL_S = 1800.0


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
    #: Bounds of `replicas`, which follow load; 0 and 0 where they do not.
    least: int = 0
    most: int = 0
    #: Of the configuration file's content when servers were started with it.
    digest: str = ""
    #: What servers were started with before an update that is on trial; None without.
    before: ReplicaSpec | None = None
    digest_before: str = ""
    #: How long the first server of an update is on trial.
    trial_s: float = 0.0
    #: Why the last update was taken back; empty when it was not.
    taken_back: str = ""
    #: Parts of the graphs that are shared out; 0 where none is.
    parts: int = 0

    @property
    def endpoint(self) -> str:
        """`host:port` of the front."""
        return f"{self.host}:{self.port}"

    @property
    def version(self) -> str:
        """What is the same while servers need not be started anew."""
        said = (self.spec, self.digest, self.cpus, self.gpus)
        return sha256(msgspec.json.encode(said)).hexdigest()[:16]

    @property
    def scales(self) -> bool:
        """True when the number of servers follows load."""
        return self.most > self.least

    @property
    def reads_figures(self) -> bool:
        """True when it depends on what servers tell of their requests."""
        return self.scales or self.before is not None


def digest_of(config: str) -> str:
    """Return what tells the contents of a configuration file apart; raises ConfigError."""
    try:
        return sha256(Path(config).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"{config}: cannot be read: {error.strerror}") from error


def bounds_of(replicas: str) -> tuple[int, int]:
    """Return the fewest and the most servers in `3` or `2..6`; raises ConfigError."""
    first, dots, last = replicas.partition("..")
    bounds = [int(word) if word.isdecimal() else 0 for word in (first, last if dots else first)]
    if not 1 <= bounds[0] <= bounds[1]:
        raise ConfigError(
            f"--replicas '{replicas}': expected a number of servers, or the fewest and the most as "
            "in 2..6"
        )
    return bounds[0], bounds[1]


def update_of(pool: Pool, spec: ReplicaSpec, trial_s: float) -> Pool:
    """Return a pool with other servers, the first of them on trial; raises ConfigError.

    One server alone has no others to be compared with, so there is no trial.
    """
    if trial_s > MOST_TRIAL_S:
        raise ConfigError(f"--trial: {trial_s:g} s is longer than {MOST_TRIAL_S:g} s")
    digest = digest_of(spec.config)
    if pool.before is not None:  # one that is on trial gives way
        pool = msgspec.structs.replace(pool, spec=pool.before, digest=pool.digest_before)
    pool = msgspec.structs.replace(pool, taken_back="")
    if not trial_s or pool.replicas < 2:
        return msgspec.structs.replace(pool, spec=spec, digest=digest, before=None, trial_s=0.0)
    if spec.config == pool.spec.config and digest != pool.digest:
        raise ConfigError(
            f"{spec.config} has changed since the servers were started, so an update could not be "
            "taken back: write the new configuration to another file for --config, or give "
            "--trial 0"
        )
    return msgspec.structs.replace(
        pool, spec=spec, digest=digest, before=pool.spec, digest_before=pool.digest,
        trial_s=trial_s,
    )  # fmt: skip


class PoolKeeper:
    """Changes a pool by what its servers tell. No clock, no I/O, not thread-safe."""

    def __init__(self, pool: Pool, now_ns: int) -> None:
        self.pool = pool
        self._trial = None if pool.before is None else Trial(int(pool.trial_s * 1e9))
        self._scaler: Scaler | None = None
        if pool.scales:
            self._scaler = Scaler(
                pool.least, pool.most, pool.replicas, start_ns=START_NS, now_ns=now_ns
            )

    @property
    def on_trial(self) -> str | None:
        """The update that is on trial, as of ``goes_on``; None without."""
        return None if self._trial is None else self.pool.spec.generation

    @property
    def told(self) -> str:
        """What is going on, for people; empty when nothing is."""
        if self._trial is None:
            return ""
        own, others = self._trial.ends
        return (
            f"an update is on trial: {_told(own)} at the server that has it, {_told(others)} at "
            "the others"
        )

    def take(self, said: Announcement, now_ns: int) -> None:
        """Take in what a server tells."""
        figures = said.figures
        name = f"{said.address} {said.incarnation}"
        if self._trial is not None:
            self._trial.told(
                name,
                Ends(figures.ended, figures.late, figures.failed),
                on_trial=said.generation == self.pool.spec.generation,
                is_ready=said.ready,
                now_ns=now_ns,
            )
        elif self._scaler is not None:
            counts = ServerCounts(figures.ended, figures.crowded, figures.run_ns, figures.cores)
            self._scaler.told(name, counts, now_ns)

    def not_started(self, generation: str, reason: str) -> bool:
        """Take in that a server did not start; returns whether that ends a trial."""
        if self._trial is None or generation != self.pool.spec.generation:
            return False
        self._take_back(f"a server did not start with it: {reason}")
        return True

    def change(self, ready: int, now_ns: int) -> bool:
        """Change the pool if that is due, where so many servers are ready.

        Returns whether servers have to be deployed anew.
        """
        if self._trial is not None:
            verdict = self._trial.verdict(now_ns)
            if verdict is None:
                return False
            if verdict.kept:
                self._trial = None
                self.pool = msgspec.structs.replace(self.pool, before=None)
                return False
            self._take_back(verdict.reason)
            return True
        if self._scaler is None:
            return False
        wanted = self._scaler.decide(ready, now_ns)
        if wanted == self.pool.replicas:
            return False
        self.pool = msgspec.structs.replace(self.pool, replicas=wanted)
        return True

    def goes_on(self, generation: str) -> bool | None:
        """Return whether a server that an update started is to stay; None when not known yet."""
        if generation != self.pool.spec.generation:
            return False
        return True if self._trial is None else None

    def _take_back(self, reason: str) -> None:
        assert self.pool.before is not None
        self._trial = None
        self.pool = msgspec.structs.replace(
            self.pool,
            spec=self.pool.before,
            digest=self.pool.digest_before,
            before=None,
            taken_back=reason,
        )


def _told(ends: Ends) -> str:
    return f"{ends.late} of {ends.ended} late and {ends.failed} failed"
