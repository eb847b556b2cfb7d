"""A model whose runs end their lanes again and again is not run for a while.

Each such end costs the other models a lane until it is started again, later each time. Requests of
one client may do it where those of another do not, so what counts is how many of a model's runs
end their lanes: about more than one in three, or several in a row.
"""

from dataclasses import dataclass

_SECOND_NS = 1_000_000_000
#: Lanes lost until a model is put aside; a request that always ends its lane costs two.
_MOST_STRIKES = 5.0
#: What a run that ends as it should takes off.
_FORGIVEN = 0.5
#: How long, first and at most; it doubles while the model goes on as before.
_FIRST_NS, _LONGEST_NS = 30 * _SECOND_NS, 600 * _SECOND_NS


@dataclass(slots=True)
class Quarantine:
    """Lanes lost by one model. Belongs to the driver's lock."""

    #: Since the model was loaded.
    lanes_lost: int = 0
    _strikes: float = 0.0
    _next_ns: int = _FIRST_NS
    _until_ns: int = 0

    def lane_lost(self, now_ns: int) -> bool:
        """A run ended its lane; True when the model is put aside for that."""
        self.lanes_lost += 1
        self._strikes += 1.0
        if self._strikes < _MOST_STRIKES or self.left_s(now_ns):
            return False
        self._until_ns = now_ns + self._next_ns
        self._next_ns = min(2 * self._next_ns, _LONGEST_NS)
        # Afterwards one more is enough.
        self._strikes = _MOST_STRIKES - 1.0
        return True

    def ran(self) -> None:
        """A run ended as it should, with an answer or with an error of its own."""
        self._strikes = max(0.0, self._strikes - _FORGIVEN)
        if not self._strikes:
            self._next_ns = _FIRST_NS

    def left_s(self, now_ns: int) -> int:
        """Seconds until the model may run again, rounded up; 0: it may."""
        return max(0, -(-(self._until_ns - now_ns) // _SECOND_NS))

    def reason(self, now_ns: int) -> str:
        """Why the model is not run now; empty when it is."""
        left_s = self.left_s(now_ns)
        if not left_s:
            return ""
        return f"its runs ended {self.lanes_lost} lanes; it is not run for another {left_s} s"
