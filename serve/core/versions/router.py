"""Router: the rules of all models, and what the ends of requests change in them."""

from collections.abc import Callable

from serve.core.versions.canary import CanaryTakenBack, CanaryWatch, RequestEnd
from serve.core.versions.rules import VersionRules

_NONE = VersionRules()


class VersionRouter:
    """Chooses versions by rules. Pure: the server and the simulator drive the same object."""

    __slots__ = ("_rules", "_watches")

    def __init__(self) -> None:
        self._rules: dict[str, VersionRules] = {}
        #: By model with a canary.
        self._watches: dict[str, CanaryWatch] = {}

    def rules(self, model: str) -> VersionRules:
        """Return the model's rules."""
        return self._rules.get(model, _NONE)

    def set_rules(self, model: str, rules: VersionRules) -> None:
        """Replace the model's rules; a canary is watched anew when its split has changed."""
        before = self.rules(model)
        self._rules[model] = rules
        if rules == _NONE:
            del self._rules[model]
        if rules.canary is None:
            self._watches.pop(model, None)
        elif (before.canary, before.shares) != (rules.canary, rules.shares):
            self._watches[model] = CanaryWatch(rules.canary)

    def choose(self, model: str, request_id: str, serves: Callable[[int], bool]) -> int | None:
        """See ``VersionRules.choose``."""
        return self.rules(model).choose(model, request_id, serves)

    def shadow_of(self, model: str, request_id: str) -> int | None:
        """Return the version that is to run a request of that id once more; None for none."""
        rules = self._rules.get(model)
        return rules.shadow if rules is not None and rules.shadows(model, request_id) else None

    def watches(self, model: str) -> bool:
        """Return True when ends of the model's requests are to be told."""
        return model in self._watches

    def ended(self, model: str, end: RequestEnd) -> CanaryTakenBack | None:
        """Count the end of a request that `choose` sent to a version.

        Returns the event when that takes the model's canary back; the rules are changed then.
        """
        watch = self._watches.get(model)
        rules = self.rules(model)
        if watch is None or end.version not in dict(rules.shares):
            return None
        reason = watch.ended(end)
        if not reason:
            return None
        self.set_rules(model, rules.without_canary())
        return CanaryTakenBack(model, watch.version, reason)
