"""Limits of tenants: how many of their requests may be unanswered, and how many may come a second.

Rates are token buckets: a tenant may send the requests of one second at once, and at least one.
"""

from collections.abc import Iterable

from serve.core.rules.admission import MIN_RETRY_NS
from serve.core.types import Nanos, Rejected, RejectReason, TenantRules

_SECOND_NS = 1_000_000_000


class TenantRates:
    """Tokens of the tenants that have rules; every step is O(1)."""

    __slots__ = ("_rules", "_tokens")

    def __init__(self) -> None:
        self._rules: dict[str, TenantRules] = {}
        #: Tokens left, and when that was counted.
        self._tokens: dict[str, tuple[float, int]] = {}

    @property
    def any(self) -> bool:
        """True when a tenant has rules."""
        return bool(self._rules)

    def set_rules(self, rules: Iterable[TenantRules]) -> None:
        """Replace all rules; tenants keep the tokens that they have."""
        self._rules = {one.name: one for one in rules}
        kept = self._rules.keys() & self._tokens.keys()
        self._tokens = {name: self._tokens[name] for name in kept}

    def refusal(self, tenant: str, unanswered: int, now_ns: Nanos) -> Rejected | None:
        """Count a request of the tenant; return why it may not enter, or None.

        `unanswered` counts the tenant's accepted requests without an answer.
        """
        rules = self._rules.get(tenant)
        if rules is None:
            return None
        if rules.max_in_queue is not None and unanswered >= rules.max_in_queue:
            return Rejected(
                RejectReason.TENANT_LIMIT,
                f"tenant '{tenant}': {unanswered} of its requests are waiting or running, at most "
                f"{rules.max_in_queue} may be",
                MIN_RETRY_NS,
            )
        rate = rules.requests_per_s
        if rate is None:
            return None
        most = max(1.0, rate)
        left, since_ns = self._tokens.get(tenant, (most, now_ns))
        left = min(most, left + (now_ns - since_ns) * rate / _SECOND_NS)
        if left >= 1.0:
            self._tokens[tenant] = left - 1.0, now_ns
            return None
        self._tokens[tenant] = left, now_ns
        return Rejected(
            RejectReason.TENANT_LIMIT,
            f"tenant '{tenant}': more than {rate:g} requests a second",
            Nanos(max(MIN_RETRY_NS, int((1.0 - left) * _SECOND_NS / rate) + 1)),
        )
