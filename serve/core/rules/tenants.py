"""Limits of tenants: how many of their requests may wait or run, and how many may come a second.

Rates are token buckets: a tenant may send the requests of one second at once, and at least one. Of
a joint request each part counts. A tenant is beyond its limits for a second after they refused one
of its requests. What it sends meanwhile runs after all that other tenants send, and leaves them the
last idle lane.
"""

from collections.abc import Iterable

from serve.core.rules.admission import MIN_RETRY_NS
from serve.core.types import Nanos, Rejected, RejectReason, TenantRules

_SECOND_NS = 1_000_000_000


class TenantRates:
    """Tokens of the tenants that have rules; every step is O(1)."""

    __slots__ = ("_refused_ns", "_rules", "_tokens")

    def __init__(self) -> None:
        self._rules: dict[str, TenantRules] = {}
        #: Tokens left, and when that was counted.
        self._tokens: dict[str, tuple[float, int]] = {}
        #: When a request was refused last.
        self._refused_ns: dict[str, Nanos] = {}

    @property
    def any(self) -> bool:
        """True when a tenant has rules."""
        return bool(self._rules)

    def set_rules(self, rules: Iterable[TenantRules]) -> None:
        """Replace all rules; tenants keep the tokens that they have."""
        self._rules = {one.name: one for one in rules}
        kept = self._rules.keys() & self._tokens.keys()
        self._tokens = {name: self._tokens[name] for name in kept}
        self._refused_ns = {
            name: at for name, at in self._refused_ns.items() if name in self._rules
        }

    def is_beyond(self, tenant: str, now_ns: Nanos) -> bool:
        """Return True within a second after the tenant's limits refused one of its requests."""
        refused_ns = self._refused_ns.get(tenant)
        return refused_ns is not None and now_ns - refused_ns < _SECOND_NS

    def refusal(
        self, tenant: str, unfinished: int, now_ns: Nanos, *, follows: bool = False
    ) -> Rejected | None:
        """Count a request of the tenant; return why it may not enter, or None.

        `unfinished` counts the tenant's requests that wait or run, also for nobody any more: who
        cancels what he sent holds no more lanes than others. One that `follows` is of a joint
        request whose first part entered: its token is owed where there is none, as a request of
        more parts than the rate would never enter.
        """
        rules = self._rules.get(tenant)
        if rules is None:
            return None
        if rules.max_in_queue is not None and unfinished >= rules.max_in_queue:
            self._refused_ns[tenant] = now_ns
            return Rejected(
                RejectReason.TENANT_LIMIT,
                f"tenant '{tenant}': {unfinished} of its requests are waiting or running, at most "
                f"{rules.max_in_queue} may be",
                MIN_RETRY_NS,
            )
        rate = rules.requests_per_s
        if rate is None:
            return None
        most = max(1.0, rate)
        left, since_ns = self._tokens.get(tenant, (most, now_ns))
        left = min(most, left + (now_ns - since_ns) * rate / _SECOND_NS)
        if left >= 1.0 or follows:
            self._tokens[tenant] = left - 1.0, now_ns
            return None
        self._tokens[tenant] = left, now_ns
        self._refused_ns[tenant] = now_ns
        return Rejected(
            RejectReason.TENANT_LIMIT,
            f"tenant '{tenant}': more than {rate:g} requests a second",
            Nanos(max(MIN_RETRY_NS, int((1.0 - left) * _SECOND_NS / rate) + 1)),
        )
