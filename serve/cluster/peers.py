"""The other servers of a cluster, as one server knows them: asked when it wants to know."""

import threading
import time
from collections.abc import Collection, Iterable, Sequence

import grpc

from serve.client.channel import address_of
from serve.client.sync_connection import Channel
from serve.core.cluster.views import MachineFacts, MachineView
from serve.pb import gnnserve_pb2

#: Most other servers that a server knows.
MOST_PEERS = 64
#: How long it waits for what others say of themselves, all at once.
ASK_S = 0.05
#: One that does not say in time is not asked again for so long.
SILENT_S = 1.0

#: Headers that a call carries.
Headers = Sequence[tuple[str, str]]


class Peer:
    """Another server, and what it said of itself last."""

    def __init__(self, server: str, max_message_bytes: int) -> None:
        self.server = server
        self.channel = Channel(address_of(server, max_message_bytes=max_message_bytes))
        #: None before it has said something.
        self.view: MachineView | None = None
        #: Its name for itself.
        self.node = ""
        #: When it said so, and until when it is left alone, by the monotonic clock.
        self.said_s = self.silent_until_s = float("-inf")

    def take(self, said: gnnserve_pb2.DescribeResponse) -> None:
        """Take in what it says of itself now."""
        self.node, self.said_s = said.node, time.monotonic()
        facts = MachineFacts(
            self.server,
            cores=max(1, said.slots),
            budget_bytes=said.budget_bytes,
            models=frozenset(said.models),
            graphs=frozenset(said.graphs),
            part=said.part if said.HasField("part") else None,
        )
        view = MachineView(facts)
        view.told(said.unanswered, 0)
        self.view = view


class Peers:
    """The other servers. Any thread may call any method."""

    def __init__(self, max_message_bytes: int) -> None:
        """Know none yet; answers have at most `max_message_bytes`."""
        self._max_message_bytes = max_message_bytes
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}

    def __bool__(self) -> bool:
        return bool(self._peers)

    def change(self, servers: Collection[str]) -> None:
        """Know these servers, `host:port` each, from now on; at most MOST_PEERS of them."""
        with self._lock:
            before = self._peers
            self._peers = {
                server: before.get(server) or Peer(server, self._max_message_bytes)
                for server in list(dict.fromkeys(servers))[:MOST_PEERS]
            }
            gone = [before[server] for server in before.keys() - self._peers.keys()]
        for peer in gone:
            peer.channel.close()

    def known(self) -> list[Peer]:
        """Return those that are not left alone now."""
        now_s = time.monotonic()
        return [peer for peer in self._peers.values() if peer.silent_until_s <= now_s]

    def close(self) -> None:
        """Know none any more, and end the calls to them. Idempotent."""
        self.change(())


def ask(peers: Iterable[Peer], headers: Headers, newer_than_s: float) -> list[Peer]:
    """Ask what has not been said since `newer_than_s`; return those of whom it is known.

    Waits for ASK_S at most. Whoever cannot be reached or is silent is left alone for a time.
    """
    peers = list(peers)
    asked = []
    for peer in peers:
        if peer.said_s <= newer_than_s:
            try:
                request = gnnserve_pb2.DescribeRequest()
                method = peer.channel.own.Describe
                asked.append((peer, method.future(request, timeout=ASK_S, metadata=headers)))
            except ValueError:  # it was closed meanwhile
                leave_alone(peer)
    for peer, future in asked:
        try:
            peer.take(future.result())
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                leave_alone(peer)
        except grpc.FutureCancelledError:
            leave_alone(peer)
    return [peer for peer in peers if peer.said_s > newer_than_s]


def leave_alone(peer: Peer) -> None:
    """Ask and send the server nothing for a time."""
    peer.silent_until_s = time.monotonic() + SILENT_S
