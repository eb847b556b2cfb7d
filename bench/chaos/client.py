"""A client process of a chaos run: sends requests of all kinds and records each outcome.

    python -m bench.chaos.client FOLDER NUMBER SEED TARGET REQUESTS RATE

It makes a file `client-NUMBER.ready` in the folder when it begins, and ends when it has sent
REQUESTS or when there is a file `stop`. It sends at most RATE requests a second, or with 0 as many
as are answered. While there is a file `calm`, it sends plain requests only, and few of them; while
there is a file `pause`, none. Where there is a file `long-lives`, no request ends a lane. The
client with the number `FLOOD` is one tenant's, and sends only while there is a file `flood`: as
much as it can. What a kind of request may end with is the checker's to know.
"""

import itertools
import mmap
import os
import queue
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.chaos import chaos_models
from bench.chaos.history import History
from bench.chaos.world import (
    BAD,
    CASES,
    DEMO,
    GOOD,
    HELD,
    HELD_NODES,
    ROLLED,
    TENANTS,
    World,
    case,
)
from serve.pb import grpc_service_pb2 as pb
from serve.pb import grpc_service_pb2_grpc as stubs
from serve.wire.messages import (
    INFER_METHOD,
    STREAM_METHOD,
    Array,
    Failure,
    Places,
    Response,
    array_bytes,
    decode_response,
    decode_stream_answer,
    encode_request,
)

#: Longest wait of a request that sets no limit of its own.
PATIENCE_S = 120.0
THREADS = 8
#: Number of the client that floods, its threads, and its tenant.
FLOOD, FLOOD_THREADS, FLOOD_TENANT = 2, 24, 0
#: File that is there from the start on where no request shall end a lane.
LONG_LIVES = "long-lives"
#: Mean time between two requests of a thread while the clients are calm.
_CALM_S = 0.4
#: Time after a request that found no server, before the next.
_PAUSE_S = 0.05
#: A sender that is behind its rate makes up for this time at most.
_BEHIND_S = 5.0
#: Kinds of requests that are sent while the clients are calm.
_PLAIN = ("tensors", "nodes")
#: Requests of one stream.
STREAMED = 20
_HELD_IDS = tuple(
    np.random.default_rng(n).choice(HELD_NODES, 1 + n % 5, replace=False).astype(np.int64)
    for n in range(CASES)
)
_RAISING_WORDS = (chaos_models.RAISE, chaos_models.SYS_EXIT) * 40
_BAD_WORDS = (
    *_RAISING_WORDS,
    chaos_models.EXIT,
    chaos_models.CRASH,
    chaos_models.STOP,
    chaos_models.HANG,
)


@dataclass(frozen=True)
class Asked:
    """A request: what is recorded of it, and what is sent."""

    id: str
    kind: str
    model: str
    #: Number of the case, or of the ids of the held graph.
    case: int
    message: bytes
    #: Limit of the call, and delay before it is cancelled.
    timeout_s: float = PATIENCE_S
    cancel_after_s: float | None = None
    more: tuple[tuple[str, Any], ...] = ()


class Region:
    """The tensors of all cases in a POSIX shared memory object, registered with the server."""

    def __init__(self, name: str) -> None:
        self.name = name
        offsets, parts, at = [], [], 0
        for number in range(CASES):
            x, edges = case(number)
            one = {}
            for key, array in (("x", x), ("edge_index", edges)):
                raw = bytes(array_bytes(array))
                one[key] = at
                parts.append((at, raw))
                at += -(-len(raw) // 64) * 64
            offsets.append(one)
        self.offsets, self.size_bytes = offsets, at
        fd = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, at)
            with mmap.mmap(fd, at) as memory:
                for start, raw in parts:
                    memory[start : start + len(raw)] = raw
        finally:
            os.close(fd)
        #: When it was registered last; 0: not since it was refused.
        self.registered_ns = 0

    def unlink(self) -> None:
        """Remove the object's name."""
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.name}")


class Sender:
    """One thread's requests, as one tenant."""

    def __init__(
        self, world: World, number: int, seed: int, history: History, channel: grpc.Channel
    ) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._history = history
        self._name = f"c{number}"
        self._floods = number >= FLOOD * THREADS
        self._tenant = FLOOD_TENANT if self._floods else number % TENANTS
        self._metadata = (("authorization", f"Bearer {world.tokens[self._tenant]}"),)
        self._expiring = (("authorization", f"Bearer {world.expiring}"),)
        self._infer: Any = channel.unary_unary(INFER_METHOD)
        self._stream: Any = channel.stream_stream(STREAM_METHOD)
        self._stub = stubs.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        has_long_lives = (world.folder / LONG_LIVES).exists()
        self._bad_words = _RAISING_WORDS if has_long_lives else _BAD_WORDS
        self._counter = itertools.count()
        self._kinds: dict[str, tuple[int, Callable[[], Asked]]] = {
            "tensors": (40, self._tensors),
            "nodes": (16, self._nodes),
            "region": (8, self._region_places),
            "cancelled": (8, self._cancelled),
            "deadline": (6, self._deadline),
            "timeout": (3, self._timeout),
            "invalid": (4, self._invalid),
            "unknown": (2, self._unknown),
            "bad": (5, self._bad),
            "expiring": (2, self._expires),
        }

    @cached_property
    def _region(self) -> Region:
        return Region(f"{self._world.region_name}{self._name}")

    def close(self) -> None:
        """Remove what is shared."""
        if "_region" in self.__dict__:
            self._region.unlink()

    def send_some(self) -> int:
        """Send a request, or now and then a stream of them; returns how many, 0 for none now."""
        if self._floods:
            if not (self._world.folder / "flood").exists():
                time.sleep(_PAUSE_S)
                return 0
            self._send(self._tensors())
            return 1
        names = list(self._kinds)
        if (self._world.folder / "calm").exists():
            time.sleep(self._random.expovariate(1 / _CALM_S))
            names = list(_PLAIN)
        elif self._random.random() < 0.01:
            return self._send_stream()
        (kind,) = self._random.choices(names, [self._kinds[name][0] for name in names])
        self._send(self._kinds[kind][1]())
        return 1

    def _send(self, asked: Asked) -> None:
        metadata = self._expiring if asked.kind == "expiring" else self._metadata
        self._began(asked)
        limits = {"timeout": asked.timeout_s, "metadata": metadata}
        try:
            if asked.cancel_after_s is None:
                message = self._infer(asked.message, **limits)
            else:
                call = self._infer.future(asked.message, **limits)
                time.sleep(asked.cancel_after_s)
                call.cancel()
                message = call.result()
            answer = decode_response(message)
        except grpc.FutureCancelledError:
            self._ended(asked.id, "CANCELLED", by_client=True)
        except grpc.RpcError as error:
            self._ended(asked.id, error.code().name, words=str(error.details())[:200])
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                time.sleep(_PAUSE_S)
            if asked.kind == "region":
                self._region.registered_ns = 0
        else:
            self._answered(asked.id, answer)

    # -- kinds of requests --------------------------------------------------------------------

    def _asked(
        self, kind: str, model: str, number: int, tensors: dict[str, Array], **more: Any
    ) -> Asked:
        request_id = f"{self._name}.{next(self._counter)}"
        options = {key: more.pop(key) for key in ("timeout_s", "cancel_after_s") if key in more}
        told = tuple((key, more.pop(key)) for key in ("registered",) if key in more)
        message = encode_request(model, tensors, request_id=request_id, **more)
        return Asked(request_id, kind, model, number, message, more=told, **options)

    def _tensors(self, kind: str = "tensors", **more: Any) -> Asked:
        number = self._random.randrange(CASES)
        model = self._random.choice(GOOD)
        x, edges = case(number)
        if self._random.random() < 0.2:
            edges = edges.astype(np.int32)
        if model in ROLLED and self._random.random() < 0.3:
            more["version"] = "1"
        return self._asked(kind, model, number, {"x": x, "edge_index": edges}, **more)

    def _nodes(self) -> Asked:
        number = self._random.randrange(CASES)
        model = self._random.choice(GOOD)
        # How far it looks cannot be measured, as it changes what it is given.
        fanouts = "-1,-1" if model == "in_place" else "all"
        parameters = {"graph": HELD, "fanouts": fanouts}
        ids = {"node_ids": _HELD_IDS[number]}
        return self._asked("nodes", model, number, ids, parameters=parameters)

    def _region_places(self) -> Asked:
        region = self._region
        if not region.registered_ns:
            at = time.monotonic_ns()
            request = pb.SystemSharedMemoryRegisterRequest(
                name=region.name, key=region.name, byte_size=region.size_bytes
            )
            try:
                self._stub.SystemSharedMemoryRegister(request, timeout=30, metadata=self._metadata)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                    return self._tensors()
            region.registered_ns = at
        number = self._random.randrange(CASES)
        x, edges = case(number)
        return self._asked(
            "region", self._random.choice(GOOD), number, {"x": x, "edge_index": edges},
            places=Places(region.name, region.offsets[number], 0), registered=region.registered_ns,
        )  # fmt: skip

    def _expires(self) -> Asked:
        return self._tensors("expiring")

    def _cancelled(self) -> Asked:
        return self._tensors("cancelled", cancel_after_s=self._random.random() * 0.02)

    def _deadline(self) -> Asked:
        return self._tensors("deadline", timeout_s=0.0005 + self._random.random() * 0.02)

    def _timeout(self) -> Asked:
        return self._tensors("timeout", parameters={"timeout": self._random.randrange(1, 10_000)})

    def _invalid(self) -> Asked:
        number = self._random.randrange(CASES)
        x, edges = (array.copy() for array in case(number))
        how = self._random.randrange(4)
        if how == 0:
            edges[self._random.randrange(2), self._random.randrange(edges.shape[1])] = len(x)
        elif how == 1:
            x[0, 0] = np.nan
        elif how == 2:
            x = x[:, :31]
        else:
            edges = edges[:1]
        tensors = {"x": x, "edge_index": edges}
        return self._asked("invalid", self._random.choice(DEMO), number, tensors)

    def _unknown(self) -> Asked:
        x, edges = case(0)
        return self._asked("unknown", "no_such_model", 0, {"x": x, "edge_index": edges})

    def _bad(self) -> Asked:
        number = self._random.randrange(CASES)
        x, edges = case(number)
        x = x.copy()
        kind = "bad"
        if self._random.random() < 0.5:
            kind = "bad_well"
        else:
            x[0, 0] = self._random.choice(self._bad_words)
        return self._asked(kind, BAD, number, {"x": x, "edge_index": edges}, timeout_s=5.0)

    # -- streams ------------------------------------------------------------------------------

    def _send_stream(self) -> int:
        """Send requests over one stream; a quarter of the streams is cut by their client."""
        asked = [
            self._tensors("streamed") if self._random.random() < 0.8 else self._nodes()
            for _ in range(STREAMED)
        ]
        cut = self._random.randrange(STREAMED) if self._random.random() < 0.25 else None
        ahead: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

        def messages() -> Iterator[bytes]:
            while (message := ahead.get()) is not None:
                yield message

        call = self._stream(messages(), timeout=PATIENCE_S, metadata=self._metadata)
        for one in asked:
            self._began(one)
            ahead.put(one.message)
        ahead.put(None)
        left = {one.id for one in asked}
        status, words = "OK", ""
        try:
            for count, message in enumerate(call):
                self._stream_answer(decode_stream_answer(message), left)
                if count == cut:
                    call.cancel()
        except grpc.RpcError as error:
            status, words = error.code().name, str(error.details())[:200]
            time.sleep(_PAUSE_S)
        for request_id in left:
            by_client = cut is not None and status == "CANCELLED"
            self._ended(request_id, f"STREAM_{status}", by_client=by_client, words=words)
        return len(asked)

    def _stream_answer(self, answer: Response | Failure, left: set[str]) -> None:
        left.discard(answer.request_id)
        if isinstance(answer, Response):
            self._answered(answer.request_id, answer)
        else:
            status = str(answer.parameters.get("status", "UNKNOWN"))
            self._ended(answer.request_id, status, words=answer.message[:200])

    # -- the record ---------------------------------------------------------------------------

    def _began(self, asked: Asked) -> None:
        more = dict(asked.more)
        if asked.cancel_after_s is not None:
            more["limit_s"] = asked.cancel_after_s
        elif asked.timeout_s < PATIENCE_S:
            more["limit_s"] = asked.timeout_s
        if asked.kind == "nodes":
            more["ids"] = _HELD_IDS[asked.case].tolist()
        self._history.write(
            id=asked.id, at=time.monotonic_ns(), kind=asked.kind, model=asked.model,
            case=asked.case, tenant=self._tenant, **more,
        )  # fmt: skip

    def _ended(self, request_id: str, status: str, **more: Any) -> None:
        self._history.write(id=request_id, end=time.monotonic_ns(), status=status, **more)

    def _answered(self, request_id: str, answer: Response) -> None:
        (output,) = answer.outputs.values()
        facts = answer.parameters
        self._ended(
            answer.request_id if answer.request_id == request_id else f"not {request_id}",
            "OK",
            model=answer.model,
            version=answer.version,
            answer=self._history.keep(output),
            uid=facts.get("request_uid"),
            graph_version=facts.get("graph_version"),
            late=facts.get("qos_violated"),
        )


def connect(world: World, target: str, **options: Any) -> grpc.Channel:
    """Return an encrypted channel of its own connection."""
    credentials = grpc.ssl_channel_credentials(world.authority.read_bytes())
    arguments = [
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.secure_channel(target, credentials, arguments, **options)


class _Pace:
    """Has one thread send at most so many requests a second, at random moments; 0: any number."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._random = rate, random.Random(seed)
        self._next_at = time.monotonic()

    def wait(self, sent: int) -> None:
        """Wait until the next request may be sent, after so many at once."""
        if not self._rate:
            return
        now = time.monotonic()
        gaps_s = sum(self._random.expovariate(self._rate) for _ in range(sent))
        self._next_at = max(self._next_at, now - _BEHIND_S) + gaps_s
        time.sleep(max(self._next_at - now, 0.0))


def main(
    folder: Path, number: int, seed: int, target: str, requests: int, rate: float = 0.0
) -> None:
    world = World(folder)
    history = History(folder, number)
    left = itertools.count(requests, -1)
    stop, pause = folder / "stop", folder / "pause"
    threads_count = FLOOD_THREADS if number == FLOOD else THREADS

    def run(thread: int) -> None:
        one = number * THREADS + thread
        sender = Sender(world, one, seed * 1000 + one, history, channel)
        pace = _Pace(0.0 if number == FLOOD else rate / threads_count, one)
        try:
            while not stop.exists():
                if pause.exists():
                    time.sleep(1.0)
                    continue
                sent = sender.send_some()
                pace.wait(sent)
                if any(next(left) <= 1 for _ in range(sent)):
                    break
        finally:
            sender.close()

    if number == FLOOD:  # it shall cost what it makes the server do, not the server's cores
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with connect(world, target) as channel:
        (folder / f"client-{number}.ready").touch()
        with ThreadPoolExecutor(threads_count) as threads:
            ends = [threads.submit(run, number) for number in range(threads_count)]
        for one in ends:
            one.result()
    history.close()


if __name__ == "__main__":
    where, which, start, address, count, rate = sys.argv[1:]
    main(Path(where), int(which), int(start), address, int(count), float(rate))
