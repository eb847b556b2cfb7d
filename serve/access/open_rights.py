"""Callers of calls that stay open: looked at again whenever credentials change."""

import threading
from collections.abc import Callable, Hashable

from serve.access.principal import Principal
from serve.errors import ServeError

#: Returns whom a call comes from; raises ServeError when they may not make it.
Admit = Callable[[], Principal]


class OpenCall:
    """A call that stays open, and whom it comes from."""

    __slots__ = ("_admit", "caller", "end")

    def __init__(self, admit: Admit, end: Callable[[ServeError], object]) -> None:
        """Look at its credentials; see ``OpenRights.add``."""
        self._admit = admit
        #: Whom it comes from, as of the last change of any credentials.
        self.caller = admit()
        self.end = end

    def look_again(self) -> ServeError | None:
        """Look at its credentials again; returns why it may not go on, None when it may."""
        try:
            self.caller = self._admit()
        except ServeError as error:
            return error
        return None


class OpenRights:
    """The open calls, by a key of each. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Hashable, OpenCall] = {}

    def add(self, key: Hashable, admit: Admit, end: Callable[[ServeError], object]) -> OpenCall:
        """Admit an open call; raises what `admit` raises.

        Args:
            key: Its key until `remove`.
            admit: Looks at its credentials, now and at each change of any.
            end: Ends the call with an error, once its caller may not make it any more.
        """
        # Under the lock, or a change between both steps would be missed.
        with self._lock:
            call = self._open[key] = OpenCall(admit, end)
        return call

    def remove(self, key: Hashable) -> None:
        """Forget a call that has ended. Idempotent."""
        with self._lock:
            self._open.pop(key, None)

    def get(self, key: Hashable) -> OpenCall | None:
        """Return the call with that key; None when it has ended."""
        return self._open.get(key)

    def look_again(self) -> None:
        """Look at all credentials, which have changed, and end the calls that may not go on."""
        with self._lock:
            ended = [
                (call, error)
                for call in self._open.values()
                if (error := call.look_again()) is not None
            ]
        for call, error in ended:
            call.end(error)
