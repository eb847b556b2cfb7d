"""The order of changes to graphs that are shared out: the sequencer gives it, see ``follower``.

Changes are numbered from 1, in the order of the sequencer's log. Each other server, a follower,
asks for those after the last that it made; so its next ask tells that it made them. Messages may be
lost, come twice or come late, and every server may start anew: who asks for nothing is asked
nothing, and what comes out of order is left out.

Two servers made the same changes when the digests of these agree, see ``chained``.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

#: A follower that asks when there is nothing new hears so after this time.
HEARTBEAT_NS = 200_000_000
#: A follower that has not asked for so long is not waited for.
ABSENT_NS = 5 * HEARTBEAT_NS
#: A change is confirmed to who sent it once all followers made it, or after this time.
CONFIRM_NS = 1_000_000_000
#: Keys of changes that are known when they come again.
MOST_KEYS = 1 << 14
_DIGEST_BYTES = 16
#: Digest of no change.
NO_CHANGES = b""


def chained(digest: bytes, record: bytes) -> bytes:
    """Return the digest of some changes and one more, from theirs and its record."""
    return hashlib.blake2b(digest + record, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class TimeToLook:
    """It is time to look; for a follower too."""


@dataclass(frozen=True, slots=True)
class ChangeSubmitted:
    """A server sent a change, perhaps again; its key tells it from all others."""

    server: str
    key: bytes


@dataclass(frozen=True, slots=True)
class ChangeLogged:
    """A change is in the log: as the next one, or from before the sequencer started."""

    key: bytes
    record: bytes
    #: Who sent it and waits; None where nobody does.
    server: str | None = None


@dataclass(frozen=True, slots=True)
class ChangeRefused:
    """A change that a server sent cannot be made; the server was told."""

    server: str
    key: bytes


@dataclass(frozen=True, slots=True)
class ChangesAsked:
    """A follower made `number` changes, of that digest, and asks for the next."""

    server: str
    number: int
    digest: bytes
    #: It can wait until there is one; else it is answered at once.
    waits: bool


SequencerEvent = TimeToLook | ChangeSubmitted | ChangeLogged | ChangeRefused | ChangesAsked


@dataclass(frozen=True, slots=True)
class LogChange:
    """Check and log the change that the server sent; then tell ``ChangeLogged`` or `Refused`."""

    server: str
    key: bytes


@dataclass(frozen=True, slots=True)
class RepeatRefusal:
    """Tell the server once more why its last change was refused: a second try must not succeed."""

    server: str


@dataclass(frozen=True, slots=True)
class SendChanges:
    """Send the follower changes of the log after that number: none where there are none."""

    server: str
    after: int


@dataclass(frozen=True, slots=True)
class RefuseHistory:
    """Tell the follower that it made changes that the log does not have."""

    server: str
    number: int


@dataclass(frozen=True, slots=True)
class ConfirmChange:
    """Tell the server that its change was made, with that number."""

    server: str
    key: bytes
    number: int


SequencerCommand = LogChange | RepeatRefusal | SendChanges | RefuseHistory | ConfirmChange


@dataclass(slots=True)
class _Asker:
    """A follower, as of its last ask."""

    made: int
    heard_ns: int
    #: When it hears that there is nothing new; None when it has had an answer.
    answer_ns: int | None


@dataclass(slots=True)
class _Unconfirmed:
    """A change of a server that waits until all made it."""

    key: bytes
    number: int
    until_ns: int


class Sequencer:
    """Numbers changes, and knows who has made which. Driven by `handle` alone."""

    def __init__(self) -> None:
        #: By number of changes, their digest.
        self._digests = [NO_CHANGES]
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._askers: dict[str, _Asker] = {}
        #: By server: it sends one change at a time.
        self._unconfirmed: dict[str, _Unconfirmed] = {}
        self._refused: dict[str, bytes] = {}

    @property
    def number(self) -> int:
        """Number of changes in the log."""
        return len(self._digests) - 1

    @property
    def wake_ns(self) -> int | None:
        """When to say that time passed, if nothing else happens before."""
        times_ns = [each.until_ns for each in self._unconfirmed.values()]
        times_ns += [e.answer_ns for e in self._askers.values() if e.answer_ns is not None]
        return min(times_ns, default=None)

    def handle(self, event: SequencerEvent, now_ns: int) -> list[SequencerCommand]:
        """Return what to do about the event, in this order."""
        match event:
            case ChangeSubmitted(server, key):
                number = self._numbers.get(key)
                if self._refused.get(server) == key:
                    return [RepeatRefusal(server)]
                if number is None:
                    return [LogChange(server, key)]
                self._wait(server, key, number, now_ns)
            case ChangeLogged(key, record, submitter):
                self._digests.append(chained(self._digests[-1], record))
                self._numbers[key] = self.number
                if len(self._numbers) > MOST_KEYS:
                    self._numbers.popitem(last=False)
                if submitter is not None:
                    self._wait(submitter, key, self.number, now_ns)
            case ChangesAsked(server, number, digest, waits):
                known = 0 <= number <= self.number and self._digests[number] == digest
                if not known:
                    self._askers.pop(server, None)
                    return [RefuseHistory(server, number)]
                answer_ns = now_ns + (HEARTBEAT_NS if waits else 0)
                self._askers[server] = _Asker(number, now_ns, answer_ns)
            case ChangeRefused(server, key):
                self._refused[server] = key
            case TimeToLook():
                pass
        return [*self._sent(now_ns), *self._confirmed(now_ns)]

    def _wait(self, server: str, key: bytes, number: int, now_ns: int) -> None:
        known = self._unconfirmed.get(server)
        if known is None or known.key != key:
            self._unconfirmed[server] = _Unconfirmed(key, number, now_ns + CONFIRM_NS)

    def _sent(self, now_ns: int) -> Iterator[SequencerCommand]:
        for server, asker in self._askers.items():
            due_ns = asker.answer_ns
            if due_ns is not None and (asker.made < self.number or due_ns <= now_ns):
                asker.answer_ns = None
                yield SendChanges(server, asker.made)

    def _confirmed(self, now_ns: int) -> Iterator[SequencerCommand]:
        present = [e.made for e in self._askers.values() if e.heard_ns + ABSENT_NS > now_ns]
        everywhere = min(present, default=self.number)
        for server, each in list(self._unconfirmed.items()):
            if each.number <= everywhere or each.until_ns <= now_ns:
                del self._unconfirmed[server]
                yield ConfirmChange(server, each.key, each.number)
