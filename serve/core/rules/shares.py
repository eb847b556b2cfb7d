"""Fair shares: a tenant that floods the server waits behind those that do not.

They matter while the last arrivals brought more work than the lanes can do (``demand``), and only
with more than one tenant among them. A tenant is over its share when its unfinished work is more
than all unfinished work divided by their number. What it sends meanwhile counts as one priority
class less urgent, so tenants within their share go first, under every policy. And a full queue
still admits a tenant that has fewer in it than its share of the queue. Every step is O(1).
"""

from collections import deque

#: Arrivals over which a tenant counts as active.
RECENT = 256


class Shares:
    """Unfinished work and requests by tenant."""

    __slots__ = ("_count", "_lately", "_recent", "_total_ns", "_work_ns")

    def __init__(self) -> None:
        self._recent: deque[str] = deque()
        #: Requests among the last arrivals, by tenant; none of them 0.
        self._lately: dict[str, int] = {}
        #: Of tenants with unfinished requests.
        self._work_ns: dict[str, int] = {}
        self._count: dict[str, int] = {}
        self._total_ns = 0

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

    def is_over(self, tenant: str) -> bool:
        """Return True when the tenant has more unfinished work than its share."""
        return self._work_ns.get(tenant, 0) * len(self._lately) > self._total_ns

    def may_queue(self, tenant: str, max_queue: int) -> bool:
        """Return True when the tenant still has room in a full queue of `max_queue`."""
        tenants = len(self._lately)
        return tenants > 1 and self._count.get(tenant, 0) < max_queue // tenants

    def enter(self, tenant: str, work_ns: int) -> None:
        """Count an admitted request of the tenant."""
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
        else:
            del self._count[tenant], self._work_ns[tenant]

    def counts(self) -> dict[str, int]:
        """Return the number of unfinished requests by tenant."""
        return dict(self._count)
