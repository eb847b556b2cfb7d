"""Traces by W3C's Trace Context: which requests are traced, and the ids of their spans.

Ids are made of the request's own, so that all who see a request find the same.
"""

import re
import zlib
from hashlib import blake2b
from typing import NamedTuple

from serve.obs.record import RequestRecord

#: Header of HTTP and gRPC with the client's span.
TRACE_PARENT = "traceparent"
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_LENGTH = 55
_SAMPLED = 1
#: What `zlib.crc32` can return.
_HASHES = 1 << 32


class TraceIds(NamedTuple):
    """Ids of a traced request, in hexadecimal digits."""

    trace_id: str
    #: Of the request's own span.
    span_id: str
    #: Of the client's span; empty for none.
    parent_id: str


def trace_parent_of(header: str) -> str:
    """Return the part of a header `traceparent` that this version knows; empty for an invalid one.

    A later version of the format may add to it.
    """
    more = header[_LENGTH:]
    if not header or _FORM.fullmatch(header[:_LENGTH]) is None:
        return ""
    return header[:_LENGTH] if not more or (more[0] == "-" and header[:2] != "00") else ""


def trace_of(record: RequestRecord, share: float) -> TraceIds | None:
    """Return the ids of a request that is traced, else None.

    The client decides about its requests; of those without a client's span a `share` is traced.
    """
    uid = record.request_uid.encode()
    parent = record.trace_parent
    if parent:
        if not int(parent[-2:], 16) & _SAMPLED:
            return None
        return TraceIds(parent[3:35], span_id_of(uid, "request"), parent[36:52])
    if zlib.crc32(uid) >= share * _HASHES:
        return None
    # The report's rows of a joint request are of one trace.
    of = record.joint_uid.encode() or uid
    return TraceIds(blake2b(of, digest_size=16).hexdigest(), span_id_of(uid, "request"), "")


def span_id_of(uid: bytes, what: str) -> str:
    """Return the id of a span of a request."""
    return blake2b(uid, digest_size=8, person=what.encode()).hexdigest()
