"""One address before several servers: asks each whether it is ready, and feeds HAProxy with it."""

import logging
import re
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from serve.client.channel import address_of
from serve.client.several import PROBE_EVERY_S, Background, CallWithdrawn
from serve.client.sync_cluster import probe
from serve.client.sync_connection import Channel
from serve.cluster.haproxy import Haproxy
from serve.core.cluster.events import DrainAsked, MachineAnnounced
from serve.core.cluster.members import MachineState, Members
from serve.core.cluster.probing import Probe, events_of
from serve.errors import ConfigError

_log = logging.getLogger(__name__)

#: A name or address, IPv6 in brackets, and a port: HAProxy takes a command for each line, and more
#: after `;`.
_SERVER = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
#: Probes are small.
_MESSAGE_BYTES = 1 << 16
_POLL_S = 0.02


class _Watched:
    """A server that the front stands before."""

    def __init__(self, server: str) -> None:
        self.channel = Channel(address_of(server, max_message_bytes=_MESSAGE_BYTES))
        #: It gets no new requests, by the operator's will.
        self.drained = False
        #: Nobody looks at it any more.
        self.left = threading.Event()
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """True once nobody wants to know of it."""
        return self._over.is_set()

    def wait(self, limit_s: float) -> None:
        """Wait before the next look; less when it is over meanwhile."""
        self._over.wait(limit_s)

    def end(self) -> None:
        """Look at it no more."""
        self._over.set()
        self.channel.close()


class Front:
    """HAProxy and the threads that feed it, one for each server."""

    def __init__(
        self, host: str, port: int, servers: Sequence[str], folder: Path, key: str = ""
    ) -> None:
        """Stand before `servers`, each `host:port` without encryption; see ``Haproxy`` for `key`.

        Raises ConfigError for servers that are not so, or the same.
        """
        _require_plain(servers)
        self._first = tuple(servers)
        self._proxy = Haproxy(host, port, folder, key)
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._members = Members()
        self._watchers = Background()

    def start(self) -> None:
        """Listen, and begin to watch the servers; raises ConfigError."""
        self._proxy.start()
        self.change(self._first)

    def change(self, servers: Sequence[str], drained: Collection[str] = ()) -> None:
        """Stand before these servers from now on; those of `drained` get no new requests.

        Requests at a server that is no longer among them end. Raises ConfigError as at the start.
        """
        _require_plain(servers)
        for server, known in self._watched.items():
            if server not in servers:
                known.end()
        for server in servers:
            found = self._watched.get(server)
            if found is None or found.over:
                before, found = found, _Watched(server)
                self._watched[server] = found
                self._watchers.start(partial(self._watch, found, before), server)
            found.drained = server in drained

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        self.change(())
        self._watchers.join()
        self._proxy.stop()

    @property
    def ready_count(self) -> int:
        """Servers that get requests."""
        with self._lock:
            return sum(member.state is MachineState.READY for member in self._members)

    @property
    def failure(self) -> str | None:
        """Why it no longer works; None while it does."""
        return self._proxy.ended

    def _watch(self, watched: _Watched, before: _Watched | None, server: str) -> None:
        """Ask one server again and again, and tell HAProxy of every change, until it is over."""
        if before is not None:
            before.left.wait()
        told: MachineState | None = None
        wrong = ""
        while not watched.over:
            began_s = time.monotonic()
            try:
                self._proxy.add(server)
                told = self._take(server, probe(watched.channel), told, watched.drained)
            except (CallWithdrawn, ValueError):
                break  # the channel was closed
            except OSError:
                pass  # HAProxy does not listen yet, or has ended; told again next time
            except ConfigError as error:  # the others have nothing to do with it
                if wrong != (wrong := str(error)):
                    _log.warning("server %s: %s", server, error)
            watched.wait(max(_POLL_S, PROBE_EVERY_S - (time.monotonic() - began_s)))
        with suppress(OSError, ConfigError):  # it ends too
            self._proxy.remove(server)
        with self._lock:
            if (member := self._members.get(server)) is not None:
                self._members.forget(member)
        watched.left.set()

    def _take(
        self, server: str, probe: Probe, told: MachineState | None, drained: bool
    ) -> MachineState | None:
        """Take in a look at a server; returns the state that HAProxy knows it in."""
        with self._lock:
            for event in events_of(probe, server, self._members):
                self._members.take(event)
            member = self._members.get(server)
            if member is not None:
                incarnation = member.view.facts.incarnation
                if drained:
                    self._members.take(DrainAsked(server, incarnation))
                elif member.state is MachineState.DRAINING:
                    # Wanted again, it joins anew with the next look.
                    facts = replace(member.view.facts, incarnation=incarnation + 1)
                    self._members.take(MachineAnnounced(facts))
            member = self._members.get(server)
            state = None if member is None else member.state
        if state is not told and state is not None:
            if state is MachineState.READY:
                self._proxy.enable(server)
            elif state is MachineState.GONE:
                self._proxy.leave(server)
            else:
                self._proxy.drain(server)
        return state


def _require_plain(servers: Sequence[str]) -> None:
    """Raise ConfigError unless each is `host:port` without encryption, none twice."""
    if len(set(servers)) != len(servers):
        raise ConfigError(f"servers of a front: none twice, got {', '.join(servers)}")
    for server in servers:
        if not _SERVER.fullmatch(server) or int(server.rpartition(":")[2]) not in range(1, 65536):
            raise ConfigError(f"server '{server}': expected host:port and nothing else")
