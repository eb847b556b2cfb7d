"""Errors for those who sent a request through the native front: a call's status, or a message."""

from functools import partial
from typing import NamedTuple, cast

from serve.native import Front, Message, PlainRequest
from serve.rpc.status import Status, status_of
from serve.rpc.stream import encode_failure
from serve.rpc.workers import Workers
from serve.wire.messages import WireError, decode_request


class Sender(NamedTuple):
    """Where an answer goes."""

    handle: int
    #: Handle of its stream, which takes errors as messages unless the first one is to end it; 0: it
    #: has none.
    stream: int
    raises: bool


def end_request(front: Front | None, sender: Sender, status: Status, request_id: str = "") -> None:
    """Tell the sender that its request ended with `status`; does nothing without a front."""
    if front is None:
        return
    if sender.stream and not sender.raises:
        front.tell(sender.handle, encode_failure(status, request_id))
    else:
        retry_ms = -1 if status.retry_after_ms is None else status.retry_after_ms
        front.fail(sender.handle, status.code.value[0], status.text, retry_ms)


def fail(front: Front | None, sender: Sender, error: Exception, request_id: str = "") -> None:
    """Tell the sender that its request ended with `error`."""
    end_request(front, sender, status_of(error), request_id)


def refuse(
    front: Front | None,
    sender: Sender,
    request: Message | PlainRequest,
    error: Exception,
    workers: Workers,
) -> None:
    """Refuse a request unread; a stream's client is told its id, which `workers` decode."""
    if isinstance(request, PlainRequest):
        request.release()
        fail(front, sender, error, request.client_id)
    elif not sender.stream or not workers.give(
        partial(_refuse_message, front, sender, request, error)
    ):
        fail(front, sender, error)


def _refuse_message(
    front: Front | None, sender: Sender, message: Message, error: Exception
) -> None:
    request_id = ""
    try:
        request_id = decode_request(memoryview(cast("bytes", message))).request_id
    except WireError as malformed:
        error = malformed
    fail(front, sender, error, request_id)


def as_message(request: Message | PlainRequest) -> Message:
    """Return the message; the place of a staged one is given up."""
    if isinstance(request, Message):
        return request
    message = request.message()
    request.release()
    return message
