"""Requests of the native front that are refused when they have come."""

from types import SimpleNamespace

from serve.errors import NotIdentified
from serve.rpc.front_calls import FrontCalls
from serve.rpc.refusals import Refusals

EXPIRED = NotIdentified("the credential has expired")


def admit(method, credentials):
    raise EXPIRED


def test_a_request_whose_credential_has_expired_since_its_headers_has_a_row():
    """The transport has counted it, and the front knew its caller."""
    rows, ended = [], []
    service = SimpleNamespace(
        not_read=lambda arrived_ns, error: rows.append((arrived_ns, error)), stream_workers=None
    )
    callers = SimpleNamespace(
        limited=True, inside=None, admit=admit, on_change=lambda changed: None
    )
    front = SimpleNamespace(fail=lambda handle, code, *told: ended.append((handle, code)))
    calls = FrontCalls(service, None, None, Refusals(), callers, None)
    calls.serve(front)
    calls.take([(7, b"a message", 0, -1, 5, [], 0, False, "", 1)])
    assert rows == [(5, EXPIRED)]
    assert [handle for handle, _ in ended] == [7]
