"""Fair shares: a tenant that floods the server waits behind those that do not.

Two rules, which matter only while there are several tenants. Every step is O(1), but for sums over
at most `MOST_TENANTS` tenants.

- Of the work done, each tenant that has requests gets a part in proportion to its weight. A tenant
  that was given `AHEAD_NS` more than another one that waits is ahead: what it sends runs after all
  else, whatever priority it asks for. Priorities order the requests of one tenant, and of several
  while none is ahead.
- While the last arrivals brought more work than the lanes can do (``demand``), a tenant is over its
  share when its unfinished work is more than its part of all unfinished work. What it sends
  meanwhile counts as one priority class less urgent, so tenants within their share go first, under
  every policy. And a full queue still admits a tenant that has fewer in it than its share of it.
"""

from collections import deque
from collections.abc import Iterable

from serve.core.types import TenantRules

#: Arrivals over which a tenant counts as active.
RECENT = 256
#: Tenants that are told apart. Those beyond share one place: their names may be made up.
MOST_TENANTS = 64
#: Work for weight 1 by which a tenant may be ahead of others.
AHEAD_NS = 100_000_000
#: Name of the place that tenants share beyond the most.
_OTHERS = ""


class Shares:
    """Unfinished work and requests by tenant."""

    __slots__ = (
        "_count", "_given_ns", "_lately", "_named", "_recent", "_total_ns", "_weights", "_work_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self._recent: deque[str] = deque()
        #: Requests among the last arrivals, by tenant; none of them 0.
        self._lately: dict[str, int] = {}
        #: Of tenants with unfinished requests.
        self._work_ns: dict[str, int] = {}
        self._count: dict[str, int] = {}
        self._total_ns = 0
        #: Work given to tenants, by weight, from a common beginning. Of those with unfinished
        #: requests, and of those that are ahead of them.
        self._given_ns: dict[str, float] = {}
        #: Of tenants whose weight is not 1.
        self._weights: dict[str, float] = {}
        #: Tenants that have rules, and so a place of their own.
        self._named: frozenset[str] = frozenset()

    def set_rules(self, rules: Iterable[TenantRules]) -> None:
        """Take the tenants' weights."""
        rules = tuple(rules)
        self._named = frozenset(one.name for one in rules)
        self._weights = {one.name: one.weight for one in rules if one.weight != 1.0}

    def place(self, tenant: str) -> str:
        """Return the name under which the tenant counts."""
        if tenant in self._lately or tenant in self._count:
            return tenant
        known = max(len(self._lately), len(self._count))
        return tenant if known < MOST_TENANTS or tenant in self._named else _OTHERS

    def asks(self, tenant: str) -> None:
        """Count a request of the tenant, whether or not it will be admitted."""
        recent = self._recent
        recent.append(tenant)
        gone = recent.popleft() if len(recent) > RECENT else None
        if gone == tenant:
            return
        lately = self._lately
        lately[tenant] = lately.get(tenant, 0) + 1
        if gone is not None:
            lately[gone] -= 1
            if not lately[gone]:
                del lately[gone]

    def has_others(self, tenant: str) -> bool:
        """Return True when another tenant is among those that asked lately."""
        return len(self._lately) > (tenant in self._lately)

    def is_over(self, tenant: str) -> bool:
        """Return True when the tenant has more unfinished work than its share."""
        weight, weights = self._weight_among(tenant)
        return self._work_ns.get(tenant, 0) * weights > self._total_ns * weight

    def is_ahead(self, tenant: str) -> bool:
        """Return True when the tenant was given more than another one that waits."""
        if len(self._count) < 2 and tenant in self._count:
            return False
        given = self._given_ns.get(tenant)
        if given is None:
            return False
        behind = [self._given_ns[other] for other in self._count if other != tenant]
        return bool(behind) and given - min(behind) > AHEAD_NS

    def may_queue(self, tenant: str, max_queue: int) -> bool:
        """Return True when the tenant still has room in a full queue of `max_queue`."""
        if len(self._lately) < 2:
            return False
        weight, weights = self._weight_among(tenant)
        return self._count.get(tenant, 0) < int(max_queue * weight / weights)

    def enter(self, tenant: str, work_ns: int) -> None:
        """Count an admitted request of the tenant."""
        given = self._given_ns
        if tenant not in self._count:
            # Time without requests earns nothing.
            least = min((given[other] for other in self._count), default=0.0)
            given[tenant] = max(given.get(tenant, least), least)
        given[tenant] += work_ns / self._weights.get(tenant, 1.0)
        self._work_ns[tenant] = self._work_ns.get(tenant, 0) + work_ns
        self._count[tenant] = self._count.get(tenant, 0) + 1
        self._total_ns += work_ns

    def leave(self, tenant: str, work_ns: int) -> None:
        """Count the end of a request, however it ended."""
        self._total_ns -= work_ns
        left = self._count[tenant] - 1
        if left:
            self._count[tenant] = left
            self._work_ns[tenant] -= work_ns
            return
        del self._count[tenant], self._work_ns[tenant]
        self._forget_given(tenant)

    def count(self, tenant: str) -> int:
        """Return the number of unfinished requests of the tenant."""
        return self._count.get(tenant, 0)

    def counts(self) -> dict[str, int]:
        """Return the number of unfinished requests by tenant."""
        return dict(self._count)

    def _weight_among(self, tenant: str) -> tuple[float, float]:
        """Return the tenant's weight, and that of all that asked lately."""
        weights = self._weights
        if not weights:
            return 1.0, float(len(self._lately))
        return weights.get(tenant, 1.0), sum(weights.get(one, 1.0) for one in self._lately)

    def _forget_given(self, tenant: str) -> None:
        """Keep what a tenant was given, now without requests, only if it is ahead of others."""
        if not self._count:
            self._given_ns.clear()
            return
        least = min(self._given_ns[other] for other in self._count)
        idle = [one for one in self._given_ns if one not in self._count]
        for one in idle:
            if self._given_ns[one] <= least or len(idle) > MOST_TENANTS:
                del self._given_ns[one]
