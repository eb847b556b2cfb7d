"""Sampling of refused requests for the database, so that refusals cannot fill the disk."""

from collections.abc import Iterator

import msgspec

from serve.obs.record import RequestRecord

#: What the report counts by: model, status, reason, and whether the target had passed.
_Kind = tuple[str, str, str, bool]


class RowSampler:
    """Chooses the requests of one batch that get a row.

    Every launched request has a row. Of the requests that never reached a lane, a limited number
    has one, and the first of each kind, whose row also counts those of its kind without a row.
    """

    def __init__(self, most: int) -> None:
        """Allow `most` rows for unlaunched requests beside the first of each kind."""
        self._most = most
        self._first: dict[_Kind, RequestRecord] = {}
        self._left_out: dict[_Kind, int] = {}

    def has_row(self, record: RequestRecord) -> bool:
        """Return True when the record is to be written now, unchanged."""
        if record.status == "OK" or record.lane >= 0:
            return True
        late = 0 < record.qos_target_ns < record.latency_ns
        kind = record.model, record.status, record.reason, late
        if kind not in self._first:
            self._first[kind] = record
            self._left_out[kind] = 0
            return False
        if self._most > 0:
            self._most -= 1
            return True
        self._left_out[kind] += 1
        return False

    def rest(self) -> Iterator[RequestRecord]:
        """Yield the rows to write at the end of the batch."""
        for kind, record in self._first.items():
            count = self._left_out[kind]
            yield msgspec.structs.replace(record, left_out=count) if count else record
