"""Trial of a configuration: the first server that has it, beside those that do not have it yet.

It begins when a server on trial is ready, counts how requests end on both sides from then on, and
ends when it has lasted long enough, or at once when the side on trial does clearly worse by the
rule for canaries (``versions.comparison``).
"""

from dataclasses import dataclass

from serve.core.cluster.growth import Growth
from serve.core.versions.comparison import Ends, worse

#: A server on trial that has said nothing for so long while others went on to do so is lost.
SILENT_NS = 15_000_000_000


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """How a trial ended, and why."""

    kept: bool
    #: Why it was not kept.
    reason: str = ""


class Trial:
    """One trial. Pure."""

    __slots__ = (
        "_began_ns", "_growth", "_heard_ns", "_is_ready", "_lasts_ns", "_others",
        "_others_heard_ns", "_own",
    )  # fmt: skip

    def __init__(self, lasts_ns: int) -> None:
        """Last so long from when a server on trial is ready."""
        self._lasts_ns = lasts_ns
        self._began_ns: int | None = None
        self._is_ready = False
        #: When a server on trial, and one of the others, said something last.
        self._heard_ns = self._others_heard_ns = 0
        self._growth = Growth()
        self._own, self._others = Ends(), Ends()

    @property
    def ends(self) -> tuple[Ends, Ends]:
        """Ends since it began: on trial, and on the others."""
        return self._own, self._others

    def told(self, server: str, ends: Ends, *, on_trial: bool, is_ready: bool, now_ns: int) -> None:
        """Take in how the requests of a server have ended in all, and whether it is ready.

        `server` names a start of a server: one that starts anew has another name.
        """
        if on_trial:
            self._is_ready, self._heard_ns = is_ready, now_ns
            if is_ready and self._began_ns is None:
                self._began_ns = now_ns
        else:
            self._others_heard_ns = now_ns
        more = Ends(*self._growth.of(server, ends, known=on_trial))
        if self._began_ns is None:
            return
        if on_trial:
            self._own = _sum(self._own, more)
        else:
            self._others = _sum(self._others, more)

    def verdict(self, now_ns: int) -> TrialEnd | None:
        """Return how it ended; None while it lasts."""
        if self._began_ns is None:
            return None
        if reason := worse(self._own, self._others, "the other servers'"):
            return TrialEnd(False, reason)
        if now_ns - self._began_ns < self._lasts_ns:
            return None
        if not self._is_ready:
            return TrialEnd(False, "the server on trial was not ready when the trial ended")
        silent_ns = self._others_heard_ns - self._heard_ns
        if silent_ns > SILENT_NS:
            silent_s = silent_ns // 1_000_000_000
            return TrialEnd(
                False, f"the server on trial had said nothing for {silent_s} s when the trial ended"
            )
        return TrialEnd(True)


def _sum(first: Ends, second: Ends) -> Ends:
    return Ends(first.ended + second.ended, first.late + second.late, first.failed + second.failed)
