"""Passing on what another server can answer and this one cannot, or not in time: once.

The decision is ``core.cluster.forward``'s. Whatever goes wrong on the way, the request is answered
here as if there were no others.
"""

import logging
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from math import inf
from pathlib import Path

import grpc
import numpy as np
from msgspec.structs import replace

from serve.access.callers import AUTHORIZATION
from serve.access.front_stamps import ARRIVED, FrontStamps
from serve.cluster.peers import Headers, Peer, Peers, ask, leave_alone
from serve.cluster.sent_parts import MOST_PART_S, SentPart, SentParts, part_message
from serve.cluster.servers_file import read_servers
from serve.core.cluster.forward import passed_on, stays
from serve.core.cluster.split import split_by_home
from serve.core.cluster.views import MachineFacts, MachineView, RoutedRequest
from serve.core.types import Task
from serve.errors import ConfigError
from serve.rpc.cancellation import Cancellation
from serve.rpc.elsewhere import HOPS, PART, Origin
from serve.server.api import InferCall, ModelInfo, Room
from serve.server.split import IdHomes, Split
from serve.wire.messages import WireRequest

_log = logging.getLogger(__name__)

#: Most requests that are being passed on at once, each with a copy of its message.
MOST_PASSED = 64
#: Others that are asked about a request that would be late here.
CHOICES = 2
#: What servers hold is believed for so long; how much they have to do is asked each time.
HELD_S = 1.0
#: While others would be late too, nothing is asked for so long.
REST_S = 0.02
#: What passing on takes, with the question before it.
HOP_NS = 2_000_000
#: How long another may take for what cannot be answered here, and at least for what can.
MOST_S, LEAST_S = 60.0, 1.0
#: How often of its target another may take for what can be answered here.
_TARGETS = 5


class OtherServers:
    """Implements ``rpc.elsewhere.Elsewhere``."""

    def __init__(
        self,
        node: str,
        room: Callable[[], Room],
        file: Path,
        max_message_bytes: int,
        stamps: FrontStamps | None = None,
    ) -> None:
        """Know the servers of `file`, see ``servers_file``; raises ConfigError.

        Args:
            node: Name of this server among them. It may be one of them.
            room: Returns what this server has for requests now.
            file: Names the servers.
            max_message_bytes: Most bytes of an answer.
            stamps: Tells others when a request came here; None to tell them nothing.
        """
        self.node = node
        self.file = file
        self._room = room
        self._stamps = stamps
        self._peers = Peers(max_message_bytes)
        self._places = threading.BoundedSemaphore(MOST_PASSED)
        self._rest_until_s = -inf
        #: Requests by what came of passing them on.
        self.counts: Counter[str] = Counter(dict.fromkeys(("answered", "failed", "kept"), 0))
        self._draw = random.Random()
        self._read()

    def reload(self) -> None:
        """Read the file again; keeps what it said before when it cannot be read, and logs it."""
        try:
            self._read()
        except ConfigError as error:
            _log.error("the other servers stay as they were: %s", error)

    def close(self) -> None:
        """Pass on nothing any more. Idempotent."""
        self._peers.close()

    def better(self, task: Task, room: Room) -> bool:
        """See ``Elsewhere``; under the driver's lock, so nothing is asked."""
        if not self._peers or time.monotonic() < self._rest_until_s:
            return False
        return not stays(_routed("", "", task), _view(self.node, room), time.monotonic_ns())

    def answer(
        self,
        request: WireRequest,
        origin: Origin,
        task: Task | None,
        remaining_s: float,
        cancellation: Cancellation,
    ) -> bytes | None:
        """See ``Elsewhere``."""
        if not self._peers or not self._places.acquire(blocking=False):
            return None
        try:
            there = self._chosen(request, origin, task)
            if there is None:
                self.counts["kept"] += 1
                return None
            limit_s = MOST_S
            if task is not None:
                limit_s = min(MOST_S, max(LEAST_S, _TARGETS * task.qos.target_ns / 1e9))
            answer = self._send(there, origin, min(limit_s, remaining_s), cancellation)
            self.counts["failed" if answer is None else "answered"] += 1
            return answer
        finally:
            self._places.release()

    def split(
        self,
        request: WireRequest,
        call: InferCall,
        model: ModelInfo,
        origin: Origin,
        homes: IdHomes,
        remaining_s: float,
        cancellation: Cancellation,
    ) -> InferCall | bytes | None:
        """See ``Elsewhere``; which parts are sent is decided by ``core.cluster.split``."""
        parts, sizes = np.unique(homes.parts, return_counts=True)
        counts = dict(zip(parts.tolist(), sizes.tolist(), strict=True))
        if counts.keys() <= {homes.here} or not self._peers:
            return None
        known = ask(self._peers.known(), _headers(origin), time.monotonic() - HELD_S)
        peers = {p.view: p for p in known if p.node != self.node and p.view is not None}
        asked = RoutedRequest(0, f"{model.name}:{model.version}", graph=call.graph or "")
        placed = split_by_home(counts, homes.here, asked, list(peers), time.monotonic_ns())
        waited_ns = time.monotonic_ns() - call.arrived_ns
        limit_s = min(MOST_PART_S, remaining_s)
        if call.timeout_ns is not None:
            limit_s = min(limit_s, (call.timeout_ns - waited_ns) / 1e9)
        if limit_s <= 0:
            return None
        if placed.whole:
            (there,) = placed.sent.values()
            return self._pass_whole(peers[there], origin, limit_s, cancellation)
        seed = secrets.randbits(63) if call.seed is None else call.seed
        left_ns = max(1, homes.target_ns - waited_ns)
        sent: list[SentPart] = []
        for part, view in placed.sent.items():
            positions = np.flatnonzero(homes.parts == part)
            message = part_message(request, call, model, homes.ids[positions], seed)
            headers = (*_headers(origin), (HOPS, "1"), (PART, str(left_ns)))
            future = self._begin(peers[view], message, limit_s, headers)
            if future is not None:
                sent.append(SentPart(part, peers[view], positions, future))
        if not sent:
            return None
        own = np.flatnonzero(~np.isin(homes.parts, [one.part for one in sent]))
        others = SentParts(sent, limit_s=limit_s, left=self._parts_left)
        split = Split(own, others, 1 + len(sent))
        return replace(call, movable=False, split=split, seed=seed, qos_target_ns=homes.target_ns)

    def _pass_whole(
        self, there: Peer, origin: Origin, limit_s: float, cancellation: Cancellation
    ) -> bytes | None:
        """Pass a request on to where all of its nodes live; None to answer it here."""
        if not self._places.acquire(blocking=False):
            return None
        try:
            answer = self._send(there, origin, limit_s, cancellation)
            self.counts["failed" if answer is None else "answered"] += 1
            return answer
        finally:
            self._places.release()

    def _begin(
        self, there: Peer, message: bytes, limit_s: float, headers: Headers
    ) -> "grpc.Future[bytes] | None":
        """Send a part, and take a place for it until `_parts_left`; None when it cannot be sent."""
        if not self._places.acquire(blocking=False):
            return None
        call: Callable[..., grpc.Future[bytes]] = there.channel.infer.future
        try:
            return call(message, timeout=limit_s, metadata=headers)
        except ValueError:  # the server is known no more
            self._places.release()
            return None

    def _parts_left(self, answered: int, lost: int) -> None:
        """Give up the places of parts that have ended."""
        self.counts["answered"] += answered
        self.counts["failed"] += lost
        self._places.release(answered + lost)

    def _stamp(self) -> str:
        """Return what tells the other server when this one got the request; empty without a key."""
        return "" if self._stamps is None else self._stamps.value(time.time_ns())

    def _read(self) -> None:
        servers, drained = read_servers(self.file)
        self._peers.change([server for server in servers if server not in drained])

    def _chosen(self, request: WireRequest, origin: Origin, task: Task | None) -> Peer | None:
        """Return the server to pass it on to; None to answer here."""
        graph = request.parameters.get("graph")
        model = f"{request.model}:{request.version}" if request.version else request.model
        routed = _routed(model, graph if isinstance(graph, str) else "", task)
        here = _view(self.node, self._room(), held=task is not None)
        can_hold = here.facts.can_hold(routed)
        headers = _headers(origin)
        held_since_s = time.monotonic() - HELD_S
        known = [
            peer
            for peer in ask(self._peers.known(), headers, held_since_s)
            if peer.node != self.node and peer.view is not None
        ]
        if can_hold:
            holding = [p for p in known if p.view is not None and p.view.facts.can_hold(routed)]
            drawn = self._draw.sample(holding, min(CHOICES, len(holding)))
            known = ask(drawn, headers, time.monotonic())
        views = {peer.view: peer for peer in known if peer.view is not None}
        now_ns = time.monotonic_ns()
        there = passed_on(routed, here, list(views), now_ns, hops=origin.hops, hop_ns=HOP_NS)
        if there is not None:
            return views[there]
        if can_hold:
            self._rest_until_s = time.monotonic() + REST_S
        return None

    def _send(
        self, there: Peer, origin: Origin, limit_s: float, cancellation: Cancellation
    ) -> bytes | None:
        """Return the server's answer; None when it has none."""
        if limit_s <= 0 or cancellation.cancelled:
            return None
        headers = [*_headers(origin), (HOPS, "1")]
        if stamp := origin.stamp or self._stamp():
            headers.append((ARRIVED, stamp))
        call: Callable[..., grpc.Future[bytes]] = there.channel.infer.future
        try:
            future = call(bytes(origin.message), timeout=limit_s, metadata=headers)
            cancellation.submitted(future)
            return future.result()
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                leave_alone(there)
            _log.info("%s did not answer what was passed on: %s", there.server, error.code().name)
        except (grpc.FutureCancelledError, ValueError):
            pass  # the client has gone, or the server is known no more
        finally:
            cancellation.finished()
        return None


def _headers(origin: Origin) -> tuple[tuple[str, str], ...]:
    """Return the headers by which others know whom the request comes from."""
    return ((AUTHORIZATION, origin.authorization),) if origin.authorization else ()


def _routed(model: str, graph: str, task: Task | None) -> RoutedRequest:
    """Return what is known of a request; without a task, what it needs is not."""
    if task is None:
        return RoutedRequest(0, model, graph=graph)
    estimate = task.estimate
    return RoutedRequest(
        task.task_id,
        model,
        need_bytes=estimate.reserve_bytes,
        solo_ns=estimate.solo_ns,
        run_ns=estimate.run_ns,
        due_ns=task.arrived_ns + task.qos.target_ns,
        graph=graph,
    )


def _view(node: str, room: Room, *, held: bool = True) -> MachineView:
    """Return this server as it sees itself; without `held` it has nothing of what is asked."""
    models = None if held else frozenset[str]()
    found = MachineView(
        MachineFacts(node, cores=room.slots, budget_bytes=room.budget_bytes, models=models)
    )
    found.told(room.unanswered, 0)
    return found
