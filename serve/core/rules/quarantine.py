"""Quarantine: a model whose runs keep ending their lanes is not run for a while.

Each such end costs the other models a lane until it is started again, with all models. Requests of
one client may end lanes where those of another do not, so the measure is the share of a model's
runs that end their lanes: quarantine begins at about one in three, or at several in a row. Requests
that come meanwhile are rejected; those that wait already fail when it is their turn.
"""

from dataclasses import dataclass

from serve.core.types import Nanos, Rejected, RejectReason

_SECOND_NS = 1_000_000_000
#: Lanes lost before a model is quarantined; a request that always ends its lane costs two.
_MOST_STRIKES = 5.0
#: Strikes that a run which leaves its lane alive takes off.
_FORGIVEN = 0.5
#: Lanes that end within this time are one strike: all end with the process that they come from,
#: and the system may end several when it is short of memory.
_TOGETHER_NS = 100_000_000
#: First and longest quarantine. The length doubles each time the model goes on as before.
_FIRST_NS, _LONGEST_NS = 30 * _SECOND_NS, 600 * _SECOND_NS


@dataclass(slots=True)
class _Conduct:
    """Lanes that one model's runs ended, since it last had no strikes."""

    lanes_lost: int = 0
    strikes: float = 0.0
    #: When the first lane of the latest strike ended.
    struck_ns: int | None = None
    next_ns: int = _FIRST_NS
    until_ns: int = 0


class Quarantine:
    """Counts lanes lost by model, on all devices together, and says which models may not run."""

    __slots__ = ("models",)

    def __init__(self) -> None:
        #: Models that ended a lane and have not made up for it.
        self.models: dict[str, _Conduct] = {}

    def lane_lost(self, model: str, now_ns: int) -> bool:
        """Count a run of the model that ended its lane; return True when quarantine begins."""
        conduct = self.models.setdefault(model, _Conduct())
        conduct.lanes_lost += 1
        if conduct.struck_ns is not None and now_ns - conduct.struck_ns < _TOGETHER_NS:
            return False
        conduct.struck_ns = now_ns
        conduct.strikes += 1.0
        if conduct.strikes < _MOST_STRIKES or now_ns < conduct.until_ns:
            return False
        conduct.until_ns = now_ns + conduct.next_ns
        conduct.next_ns = min(2 * conduct.next_ns, _LONGEST_NS)
        # Afterwards one more is enough.
        conduct.strikes = _MOST_STRIKES - 1.0
        return True

    def lane_kept(self, model: str) -> None:
        """Count a run of the model that ended, well or with an error, and left its lane alive."""
        conduct = self.models.get(model)
        if conduct is not None:
            conduct.strikes -= _FORGIVEN
            if conduct.strikes <= 0.0:
                del self.models[model]

    def forget(self, model: str) -> None:
        """Drop what is known of a model that is unloaded."""
        self.models.pop(model, None)

    def left_ns(self, model: str, now_ns: int) -> int:
        """Return the time until the model may run again; 0 when it may run now."""
        conduct = self.models.get(model)
        return 0 if conduct is None else max(0, conduct.until_ns - now_ns)

    def rejects(self, model: str, now_ns: int) -> Rejected | None:
        """Return the answer to a new task of the model; None when the model may run now."""
        reason = self.reason(model, now_ns)
        if not reason:
            return None
        return Rejected(RejectReason.QUARANTINED, reason, Nanos(self.left_ns(model, now_ns)))

    def reason(self, model: str, now_ns: int) -> str:
        """Return why the model is not run now, in whole seconds; empty when it may run."""
        left_ns = self.left_ns(model, now_ns)
        if not left_ns:
            return ""
        lost, left_s = self.models[model].lanes_lost, -(-left_ns // _SECOND_NS)
        return f"its runs ended {lost} lanes; it is not run for another {left_s} s"
