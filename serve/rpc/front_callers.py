"""Who calls through the native front: decided at a call's headers, before its message comes."""

from contextlib import suppress
from functools import partial

from serve.access.callers import Callers
from serve.access.open_rights import OpenRights
from serve.access.principal import Principal
from serve.errors import ServeError
from serve.native import Front
from serve.rpc.guard import count_refusal
from serve.rpc.refusals import Refusals
from serve.rpc.status import status_of
from serve.wire.messages import INFER_METHOD, STREAM_METHOD

#: Headers of a call that tell whom it comes from.
Credentials = list[tuple[str, str]] | None


class FrontCallers:
    """Tells the front who may call. The thread that polls calls all methods."""

    def __init__(self, callers: Callers, refusals: Refusals) -> None:
        """`refusals` counts calls that their caller may not make."""
        self._callers, self._refusals = callers, refusals
        self._streams = OpenRights()
        self._front: Front | None = None
        self._has_changed = False

    def serve(self, front: Front) -> None:
        """Begin to decide for `front`, and to follow changes of credentials."""
        self._front = front
        self._callers.on_change(lambda tenants: self._changed())

    def decide(
        self, handle: int, method: str, credentials: Credentials, calls: int, *, stays: bool
    ) -> None:
        """Admit or refuse `calls` calls whose headers are there; `stays`: it is a stream."""
        assert self._front is not None
        admit = partial(self._callers.admit, method, credentials or ())
        try:
            if stays:
                self._streams.add(handle, admit, partial(self._end, handle))
            else:
                admit()
        except ServeError as error:
            count_refusal(error, self._refusals, calls)
            status = status_of(error)
            self._front.fail(handle, status.code.value[0], status.text)
        else:
            self._front.admit(handle)

    def caller(self, stream: int, credentials: Credentials) -> Principal:
        """Return whom a complete request comes from; raises ServeError.

        Args:
            stream: Handle of its stream; 0 without.
            credentials: Of a call without a stream.
        """
        if (opened := self._streams.get(stream)) is not None:
            return opened.caller
        try:
            return self._callers.admit(STREAM_METHOD if stream else INFER_METHOD, credentials or ())
        except ServeError as error:
            count_refusal(error, self._refusals)
            raise

    def ended(self, handle: int) -> None:
        """Note that a call has ended."""
        self._streams.remove(handle)

    def follow(self) -> None:
        """Look again at the callers of open streams, if credentials have changed."""
        if self._has_changed:
            self._has_changed = False
            if self._front is not None:
                self._front.forget_admitted()
            self._streams.look_again()

    def leave(self) -> None:
        """Decide no more, as the front is going to be closed."""
        self._front = None

    def _changed(self) -> None:
        """Have the thread that polls look again. Any thread."""
        self._has_changed = True
        if (front := self._front) is not None:
            with suppress(ValueError):  # the front is closed
                front.wake()

    def _end(self, handle: int, error: ServeError) -> None:
        if self._front is not None:
            status = status_of(error)
            self._front.finish(handle, status.code.value[0], status.text)
