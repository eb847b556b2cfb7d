"""Choice of the requests that a report is about, as a condition in SQL."""

import time
from datetime import UTC, datetime

import msgspec

from serve.errors import ConfigError
from serve.units import parse_duration

#: Names of the filters, and the column that each compares.
_COLUMNS = {"model": "model", "version": "version", "tenant": "tenant", "client": "client_id",
            "cause": "cause"}  # fmt: skip
#: What `selection_of` reads.
FILTERS = ("since", "from", "until", *_COLUMNS)


#: Latest time that the database's integers hold, and a duration that begins before all times.
_LAST_UNIX_NS = 2**63 - 1
_EVER_S = 1e10


class Selection(msgspec.Struct, frozen=True):
    """Filters that a request has to pass, all of them; an empty one passes every request.

    Times of arrival are ns since the epoch, with the first included and the last not.
    """

    from_unix_ns: int = 0
    until_unix_ns: int = 0
    model: str = ""
    version: str = ""
    tenant: str = ""
    #: Id that the client sent.
    client: str = ""
    cause: str = ""

    def condition(self) -> tuple[str, list[str | int]]:
        """Return a condition for WHERE, and the values of its question marks."""
        parts, values = ["arrived_unix_ns >= ?"], list[str | int]([self.from_unix_ns])
        if self.until_unix_ns:
            parts.append("arrived_unix_ns < ?")
            values.append(self.until_unix_ns)
        for name, column in _COLUMNS.items():
            if wanted := getattr(self, name):
                parts.append(f"{column} = ?")
                values.append(wanted)
        return " AND ".join(parts), values


def last(seconds: float) -> Selection:
    """Select what arrived in the last so many seconds; everything when that is 0."""
    if not seconds:
        return Selection()
    return Selection(from_unix_ns=max(0, time.time_ns() - int(min(seconds, _EVER_S) * 1e9)))


def selection_of(filters: dict[str, str]) -> Selection:
    """Return the selection that texts by name of `FILTERS` describe; empty ones are left out.

    Raises ConfigError, which names the filter and the rule, for an unknown name or a wrong value.
    """
    if unknown := sorted(set(filters) - set(FILTERS)):
        raise ConfigError(f"unknown filter {unknown[0]!r}; known filters: {', '.join(FILTERS)}")
    since, first, end = (filters.get(name, "") for name in ("since", "from", "until"))
    if since and first:
        raise ConfigError("since and from exclude each other; give one of them")
    return Selection(
        from_unix_ns=last(parse_duration(since, "since")).from_unix_ns
        if since
        else _moment("from", first),
        until_unix_ns=_moment("until", end),
        **{name: filters.get(name, "") for name in _COLUMNS},
    )


def _moment(name: str, text: str) -> int:
    """Return ns since the epoch of an ISO 8601 time; UTC where it names no zone. 0 for none."""
    if not text:
        return 0
    try:
        # A plus sign that a URL did not escape arrives as a space.
        moment = datetime.fromisoformat(text.strip().replace(" +", "+"))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return min(max(0, round(moment.timestamp() * 1e6)) * 1000, _LAST_UNIX_NS)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{name}={text!r} is no time; write it as 2026-01-31T08:00 (UTC) or with a zone"
        ) from error
