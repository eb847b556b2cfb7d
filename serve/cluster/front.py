"""One address before several servers: asks each whether it is ready, and feeds HAProxy with it."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from serve.client.channel import address_of
from serve.client.several import PROBE_EVERY_S, Background, CallWithdrawn
from serve.client.sync_cluster import probe
from serve.client.sync_connection import Channel
from serve.cluster.haproxy import Haproxy
from serve.core.cluster.members import MachineState, Members
from serve.core.cluster.probing import Probe, events_of
from serve.errors import ConfigError

#: Probes are small.
_MESSAGE_BYTES = 1 << 16
_POLL_S = 0.02


class Front:
    """HAProxy and the threads that feed it, one for each server."""

    def __init__(self, host: str, port: int, servers: Sequence[str], folder: Path) -> None:
        """Stand before `servers`, each `host:port` without encryption.

        Raises ConfigError for servers that are not so, or the same.
        """
        if not servers or len(set(servers)) != len(servers):
            raise ConfigError(f"at least one server, none twice, got {', '.join(servers)}")
        if encrypted := [server for server in servers if "/" in server or ":" not in server]:
            raise ConfigError(f"server '{encrypted[0]}': expected host:port and nothing else")
        self._proxy = Haproxy(host, port, servers, folder)
        self._channels = {
            server: Channel(address_of(server, max_message_bytes=_MESSAGE_BYTES))
            for server in servers
        }
        self._lock = threading.Lock()
        self._members = Members()
        self._over = threading.Event()
        self._watchers = Background()
        self._failure: str | None = None

    def start(self) -> None:
        """Listen, and begin to watch the servers; raises ConfigError."""
        self._proxy.start()
        for server in self._channels:
            self._watchers.start(self._watch, server)

    def stop(self) -> None:
        """Stop listening. Idempotent."""
        self._over.set()
        for channel in self._channels.values():
            channel.close()
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
        return self._failure or self._proxy.ended

    def _watch(self, server: str) -> None:
        """Ask one server again and again, and tell HAProxy of every change."""
        told: MachineState | None = None
        while not self._over.is_set():
            began_s = time.monotonic()
            try:
                told = self._take(server, probe(self._channels[server]), told)
            except (CallWithdrawn, ValueError):
                return  # the front stops
            except OSError:
                pass  # HAProxy does not listen yet, or has ended; told again next time
            except ConfigError as error:
                self._failure = str(error)
            self._over.wait(max(_POLL_S, PROBE_EVERY_S - (time.monotonic() - began_s)))

    def _take(self, server: str, probe: Probe, told: MachineState | None) -> MachineState | None:
        """Take in a look at a server; returns the state that HAProxy knows it in."""
        with self._lock:
            for event in events_of(probe, server, self._members):
                self._members.take(event)
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
