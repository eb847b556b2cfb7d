"""Which of many refused requests get a row, so that refusing them cannot fill the disk."""

from collections.abc import Iterator

import msgspec

from serve.obs.record import RequestRecord

#: Model, status, reason and whether the target had passed: what the report counts by.
_Kind = tuple[str, str, str, bool]


class RowSampler:
    """Of the requests of one batch that never reached a lane: some, and the number of the others.

    A request that was launched always has its row. So has the first of each kind, which also tells
    how many of its kind have none.
    """

    def __init__(self, most: int) -> None:
        """Take at most so many, besides the first of each kind."""
        self._most = most
        self._first: dict[_Kind, RequestRecord] = {}
        self._left_out: dict[_Kind, int] = {}

    def has_row(self, record: RequestRecord) -> bool:
        """Whether the record is to be written as it is, now."""
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
        """What is to be written at the end of the batch."""
        for kind, record in self._first.items():
            count = self._left_out[kind]
            yield msgspec.structs.replace(record, left_out=count) if count else record
