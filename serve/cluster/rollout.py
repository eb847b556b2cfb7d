"""When the servers of a cluster are to be deployed anew, as its pool changes by itself."""

from collections.abc import Callable

from serve.cluster.pool import Pool, PoolKeeper
from serve.cluster.registry import Announcement

#: A deployment that failed is tried again after this.
DEPLOY_AGAIN_NS = 5_000_000_000
#: The server of an update that is given up has so long to end; its machine may be lost.
MOST_END_NS = 120_000_000_000


class Rollout:
    """Follows a pool and says when to deploy it. No clock, no I/O, not thread-safe.

    Whoever sets a pool by ``keep`` deploys it too. What the pool becomes by itself is ``due`` here.
    """

    def __init__(self, pool: Pool, now_ns: int) -> None:
        self._keeper = PoolKeeper(pool, now_ns)
        #: The servers are not as the pool says.
        self._undeployed = False
        self._is_ending = False
        #: Why the last deployment failed; empty when it did not.
        self.problem = ""
        self._not_before_ns = 0
        #: The last update that was given up while it was on trial, and when.
        self._given_up: tuple[str, int] | None = None

    @property
    def pool(self) -> Pool:
        """How the cluster is to be."""
        return self._keeper.pool

    @property
    def told(self) -> str:
        """What is going on, for people; empty when nothing is."""
        anew = "the servers are being deployed anew" if self._undeployed else ""
        return self._keeper.told or anew

    def keep(self, pool: Pool, now_ns: int) -> None:
        """Follow this pool from now on; an update on trial that is not its own is given up."""
        if self._keeper.on_trial != pool.spec.generation:
            self._give_up(self._keeper.on_trial, now_ns)
        self._keeper = PoolKeeper(pool, now_ns)
        self._undeployed, self._is_ending, self.problem = False, False, ""

    def leave_alone(self, now_ns: int) -> None:
        """Change nothing any more: the cluster is about to end."""
        self._is_ending = True
        self._give_up(self._keeper.on_trial, now_ns)

    def take(self, said: Announcement, now_ns: int) -> None:
        """See ``PoolKeeper.take``."""
        self._keeper.take(said, now_ns)

    def goes_on(self, generation: str) -> bool | None:
        """See ``PoolKeeper.goes_on``; nothing goes on when the cluster is about to end."""
        return False if self._is_ending else self._keeper.goes_on(generation)

    def not_started(self, generation: str, reason: str, now_ns: int) -> None:
        """See ``PoolKeeper.not_started``."""
        if self._keeper.not_started(generation, reason):
            self._undeployed = True
            self._give_up(generation, now_ns)

    def change(self, ready: int, now_ns: int) -> None:
        """See ``PoolKeeper.change``."""
        update = self._keeper.on_trial
        if not self._is_ending and self._keeper.change(ready, now_ns):
            self._undeployed = True
            self._give_up(update, now_ns)

    def is_settled(self, has: Callable[[str], bool], now_ns: int) -> bool:
        """Return True when no server of an update that was given up is left, or it had its time.

        `has` tells whether there is a server that an update started. Serve kills replicas whose
        constructors have not returned, as those of a trial, and nobody would end their servers
        then.
        """
        if self._given_up is None:
            return True
        update, since_ns = self._given_up
        return not has(update) or now_ns - since_ns > MOST_END_NS

    def due(self, has: Callable[[str], bool], now_ns: int) -> Pool | None:
        """Return the pool that is to be deployed now; None when nothing is due."""
        is_due = (
            self._undeployed
            and not self._is_ending
            and now_ns >= self._not_before_ns
            and self.is_settled(has, now_ns)
        )
        return self.pool if is_due else None

    def deployed(self, pool: Pool) -> None:
        """Take in that a pool is deployed; it may have changed meanwhile."""
        self.problem = ""
        self._undeployed = self.pool != pool

    def not_deployed(self, reason: str, now_ns: int) -> None:
        """Take in why a deployment failed; it is due again later."""
        self.problem = f"the servers were not deployed anew: {reason}"
        self._not_before_ns = now_ns + DEPLOY_AGAIN_NS

    def _give_up(self, update: str | None, now_ns: int) -> None:
        if update is not None:
            self._given_up = update, now_ns
