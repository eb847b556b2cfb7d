"""Calls that ended before they became requests, as rows of the report.

The transport counts them by reason. Each batch of the sink gets a row for each reason with new
ones, which stands for all of them: `left_out` counts the others.
"""

import itertools
import time
import uuid
from collections.abc import Callable, Mapping

from serve.errors import ErrorCode
from serve.obs.record import RequestRecord

#: Reasons that end one inference call, and the status that its client gets.
STATUS_BY_REASON = {
    "unread": ErrorCode.CANCELLED.status,
    "malformed": ErrorCode.INVALID.status,
    "no_message": ErrorCode.DEADLINE.status,
    "no_thread": ErrorCode.EXHAUSTED.status,
    "message_size": ErrorCode.EXHAUSTED.status,
    "receiving_bytes": ErrorCode.EXHAUSTED.status,
}


class LostCalls:
    """Makes records of what the transport has counted since it was asked last."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """`counts` returns the calls so far, by reason; reasons of other things are left out."""
        self._counts = counts
        self._told = dict.fromkeys(STATUS_BY_REASON, 0)
        boot_id = uuid.uuid4().hex[:8]
        self._uids = (f"{boot_id}-l{number}" for number in itertools.count(1))

    def records(self) -> list[RequestRecord]:
        """Return a record for each reason with new calls."""
        now = self._counts()
        found = []
        for reason, status in STATUS_BY_REASON.items():
            new = now.get(reason, 0) - self._told[reason]
            if new <= 0:
                continue
            self._told[reason] += new
            found.append(
                RequestRecord(
                    request_uid=next(self._uids),
                    model="unknown",
                    version="",
                    arrived_unix_ns=time.time_ns(),
                    status=status,
                    reason=reason,
                    message="the call ended before it became a request",
                    left_out=new - 1,
                )
            )
        return found
