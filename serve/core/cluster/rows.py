"""Where a request gets rows of features from that other servers hold, and when it gives up.

The features of a graph are shared out in parts. A part may be on several servers, its replicas. A
request asks one of them for each part that it needs, and the next one when that fails.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

#: A store that failed is asked last for so long, and for twice as long each time it fails again, up
#: to a most.
SILENT_NS, MOST_SILENT_NS = 250_000_000, 4_000_000_000
#: Share of the patience that a store gets while others of its part have not been asked.
_FIRST_SHARE = 0.4
#: What an exchange of rows takes while nothing is known: a round, and each byte.
_ROUND_NS, _BYTES_PER_NS = 300_000, 1.0


@dataclass(slots=True, eq=False)
class Store:
    """A server that holds a part of the features, as another server sees it."""

    address: str
    part: int
    #: Requests of this server that wait for it.
    unanswered: int = 0
    #: Requests that it was asked for until now.
    asked: int = 0
    #: It failed, and is asked last until then.
    silent_until_ns: int = 0
    #: For how long it was to be asked last when it failed; 0 when it has answered since.
    silent_ns: int = 0
    #: It is no server of the graph any more.
    gone: bool = False

    def heard(self) -> None:
        """Take note that it answered."""
        self.silent_until_ns = self.silent_ns = 0

    def failed(self, now_ns: int) -> None:
        """Take note that it failed; that many requests see it fail at once counts once."""
        if now_ns >= self.silent_until_ns:
            self.silent_ns = min(2 * self.silent_ns or SILENT_NS, MOST_SILENT_NS)
        self.silent_until_ns = now_ns + self.silent_ns


@dataclass(frozen=True, slots=True)
class Lost:
    """A part whose rows no store gave."""

    part: int
    #: What the stores of the part did, with their addresses.
    told: str


class Stores:
    """The stores that are known, by part. Not thread-safe."""

    def __init__(self, parts: Mapping[str, int]) -> None:
        """`parts` has the part of each address."""
        self._of_part: dict[int, list[Store]] = {}
        self.change(parts)

    def change(self, parts: Mapping[str, int]) -> None:
        """Know these stores from now on; what is known of those that stay is kept."""
        before = {(one.address, one.part): one for of in self._of_part.values() for one in of}
        self._of_part = {}
        for address, part in parts.items():
            store = before.pop((address, part), None) or Store(address, part)
            self._of_part.setdefault(part, []).append(store)
        for store in before.values():
            store.gone = True
        for of in self._of_part.values():  # a new one need not catch up with the others
            most = max(store.asked for store in of)
            for store in of:
                store.asked = store.asked or most

    def of(self, part: int) -> list[Store]:
        """Return the stores of the part."""
        return self._of_part.get(part, [])

    def choose(self, part: int, now_ns: int, avoid: Collection[Store] = ()) -> Store | None:
        """Return whom to ask for the part: who did not fail lately, of these who has least to do.

        Of those with as much to do, the one that was asked least often.
        Where all failed lately, the one whose failure is longest ago. None when all are avoided.
        """
        able = [store for store in self.of(part) if store not in avoid]
        return min(
            able,
            key=lambda s: (max(0, s.silent_until_ns - now_ns), s.unanswered, s.asked),
            default=None,
        )


@dataclass(slots=True)
class _Wanted:
    """A part of which a request has not got all rows."""

    #: Who is asked for it now, and when that has taken too long.
    store: Store
    until_ns: int
    #: Who failed, and what each did.
    failed: dict[Store, str] = field(default_factory=dict)


class RowFetch:
    """What one request waits for, from when it needs rows of others until it has all of them.

    Whoever carries it out asks the stores that it names, and tells it what they did. It ends with
    no part wanted, or with a part that is lost: at the latest when no rows came for its patience.
    """

    def __init__(
        self, stores: Stores, parts: Collection[int], now_ns: int, patience_ns: int
    ) -> None:
        """Want rows of `parts`; nobody may send nothing for longer than `patience_ns`."""
        self._stores = stores
        self._patience_ns = patience_ns
        self._until_ns = now_ns + patience_ns
        self._first_ns = int(_FIRST_SHARE * patience_ns)
        self._wanted: dict[int, _Wanted] = {}
        #: The part that ended the fetch; None while none did.
        self.lost: Lost | None = None
        for part in parts:
            self._ask(part, now_ns, {})

    @property
    def done(self) -> bool:
        """True when nothing is waited for any more."""
        return self.lost is not None or not self._wanted

    @property
    def wake_ns(self) -> int:
        """When a store has taken too long, if none answers before."""
        return min((each.until_ns for each in self._wanted.values()), default=self._until_ns)

    def asked(self, part: int) -> Store | None:
        """Return who is asked for the part now; None when it is not wanted any more."""
        wanted = self._wanted.get(part)
        return None if wanted is None else wanted.store

    def progressed(self, part: int, now_ns: int) -> None:
        """Take note that the store of the part sent some of its rows, and is asked for more."""
        wanted = self._wanted[part]
        self._until_ns = now_ns + self._patience_ns
        wanted.until_ns = self._limit_ns(part, now_ns, wanted.failed)

    def answered(self, part: int) -> None:
        """Take note that all rows of the part are here."""
        wanted = self._wanted.pop(part)
        wanted.store.unanswered -= 1
        wanted.store.heard()

    def failed(self, part: int, told: str, now_ns: int) -> Store | None:
        """Take note of what the store of the part did instead; return whom to ask now.

        None when the part is lost.
        """
        wanted = self._wanted.pop(part)
        wanted.store.unanswered -= 1
        wanted.store.failed(now_ns)
        return self._ask(part, now_ns, {**wanted.failed, wanted.store: told})

    def overdue(self, now_ns: int) -> list[int]:
        """Return the parts whose stores have taken too long."""
        return [part for part, each in self._wanted.items() if each.until_ns <= now_ns]

    def end(self) -> None:
        """Wait for nothing any more. Idempotent."""
        for wanted in self._wanted.values():
            wanted.store.unanswered -= 1
        self._wanted.clear()

    def _ask(self, part: int, now_ns: int, failed: dict[Store, str]) -> Store | None:
        store = None
        if now_ns < self._until_ns:
            store = self._stores.choose(part, now_ns, failed)
        if store is None:
            told = "; ".join(f"{one.address} {what}" for one, what in failed.items())
            self.lost = self.lost or Lost(part, told or "no server is known to hold it")
            return None
        store.unanswered += 1
        store.asked += 1
        self._wanted[part] = _Wanted(store, self._limit_ns(part, now_ns, failed), failed)
        return store

    def _limit_ns(self, part: int, now_ns: int, failed: dict[Store, str]) -> int:
        """Return until when the store that is asked next may take."""
        if len(failed) + 1 >= len(self._stores.of(part)):
            return self._until_ns
        return min(self._until_ns, now_ns + self._first_ns)


def expected_ns(remote_bytes: int, stores_asked: int) -> int:
    """Return what it takes to get so many bytes of others, before one has been timed.

    They are asked at once, so it is one round; 0 when nobody is asked.
    """
    return _ROUND_NS + int(remote_bytes / _BYTES_PER_NS) if stores_asked else 0
