"""What hostile clients send to a server under chaos: each returns when it is over, in seconds."""

import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import numpy as np

from bench.chaos.client import connect
from bench.chaos.world import World
from bench.kit.http2_frames import (
    END_HEADERS,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    head_block,
    prefixed,
    reset,
)
from serve.wire.messages import INFER_METHOD, encode_request

_MIB = 1 << 20


class Attacker:
    """A client with a tenant's token and bad intentions."""

    def __init__(self, world: World, grpc_port: int, http_port: int) -> None:
        self._world = world
        self._ports = grpc_port, http_port
        self._token = world.tokens[0]
        self._tls = ssl.create_default_context(cafile=str(world.authority))
        self._tls.set_alpn_protocols(["h2"])
        self._head = head_block(INFER_METHOD, ("authorization", f"Bearer {self._token}"))

    def half_open(self, connections: int = 4, calls: int = 150, hold_s: float = 3.0) -> None:
        """Begin calls and send no message, then hang up."""
        with ExitStack() as stack:
            held = [self._http2(stack) for _ in range(connections)]
            for one in held:
                self._send(one, (self._heads(range(calls)),))
            time.sleep(hold_s)

    def half_a_message(self, connections: int = 4, hold_s: float = 3.0) -> None:
        """Claim messages of 8 MiB, send 1 MiB of each, then hang up."""
        with ExitStack() as stack:
            for _ in range(connections):
                one = self._http2(stack)
                part = prefixed(bytes(16_000), claims=8 * _MIB)
                self._send(one, (self._heads((0,)), frame(0, 0, 1, part)))
                self._send(one, (frame(0, 0, 1, bytes(16_000)) for _ in range(3)))
            time.sleep(hold_s)

    def resets(self, calls: int = 3000) -> None:
        """Begin calls and reset each at once."""
        with ExitStack() as stack:
            one = self._http2(stack)
            for first in range(0, calls, 100):
                numbers = range(first, first + 100)
                self._send(one, (self._heads((n,)) + reset(2 * n + 1) for n in numbers))

    def dripping(self, connections: int = 20, for_s: float = 4.0) -> None:
        """Send a byte every fifth of a second to both ports."""
        texts = (
            PREFACE + frame(SETTINGS, 0, 0) + self._heads((0,)),
            b"POST /v2/models/gcn/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{",
        )
        with ExitStack() as stack:
            held: list[tuple[socket.socket, bytes]] = []
            for number in range(connections):
                with suppress(OSError):
                    one = self._encrypted(stack, self._ports[number % 2])
                    held.append((one, texts[number % 2]))
            for at in range(int(for_s / 0.2)):
                for one, text in held:
                    self._send(one, (text[at : at + 1],))
                time.sleep(0.2)

    def garbage(self, connections: int = 20) -> None:
        """Send random bytes to both ports, some of them not even encrypted."""
        for number in range(connections):
            with ExitStack() as stack, suppress(OSError):
                port = self._ports[number % 2]
                raw = socket.create_connection(("127.0.0.1", port), timeout=5)
                one = stack.enter_context(raw)
                if number % 4 < 2:
                    one = self._encrypted(stack, port)
                self._send(one, (random.randbytes(20_000),))

    def empties(self) -> str:
        """Send 16 MiB of empty raw contents; returns the status."""
        return self._infer(b"\x3a\x00" * (8 * _MIB), grpc.Compression.NoCompression)

    def gzip_bomb(self) -> str:
        """Send 80 MiB of zeros in 80 KB; returns the status."""
        return self._infer(bytes(80 * _MIB), grpc.Compression.Gzip)

    def connections(self, count: int = 300, hold_s: float = 2.0) -> None:
        """Open many connections and say nothing."""
        with ExitStack() as stack:
            for _ in range(count):
                with suppress(OSError):
                    one = socket.create_connection(("127.0.0.1", self._ports[0]), timeout=5)
                    stack.enter_context(one)
            time.sleep(hold_s)

    def handshakes(self, count: int = 300) -> None:
        """Begin TLS, have the server do its part, and hang up."""
        hello = self._hello()
        for _ in range(count):
            with suppress(OSError):
                one = socket.create_connection(("127.0.0.1", self._ports[0]), timeout=5)
                with one:
                    one.sendall(hello)
                    one.recv(1)

    def _hello(self) -> bytes:
        """Return what a client says first."""
        back, there = ssl.MemoryBIO(), ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            self._tls.wrap_bio(back, there, server_hostname="127.0.0.1").do_handshake()
        return there.read()

    def beyond_its_limits(self, calls: int = 2000) -> Counter[str]:
        """Send more requests than its tenant may, by one connection; returns how they ended."""
        return self._flood(calls, self._token)

    def wrong_tokens(self, calls: int = 2000) -> Counter[str]:
        """Send requests with a token that nobody has, by one connection; returns how they ended."""
        return self._flood(calls, "gnn_nobody")

    def _flood(self, calls: int, token: str) -> Counter[str]:
        x, edges = np.zeros((3, 32), np.float32), np.zeros((2, 1), np.int64)
        message = encode_request("gcn", {"x": x, "edge_index": edges})
        metadata = (("authorization", f"Bearer {token}"),)
        with connect(self._world, f"127.0.0.1:{self._ports[0]}") as channel:
            infer: Any = channel.unary_unary(INFER_METHOD)
            sent = [infer.future(message, timeout=60, metadata=metadata) for _ in range(calls)]
            return Counter(str(one.code().name) for one in sent)

    def _infer(self, message: bytes, compression: grpc.Compression) -> str:
        target = f"127.0.0.1:{self._ports[0]}"
        with connect(self._world, target, compression=compression) as channel:
            infer: Any = channel.unary_unary(INFER_METHOD)
            try:
                infer(message, timeout=60, metadata=(("authorization", f"Bearer {self._token}"),))
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def _heads(self, numbers: Iterable[int]) -> bytes:
        return b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1, self._head) for n in numbers)

    def _http2(self, stack: ExitStack) -> socket.socket:
        one = self._encrypted(stack, self._ports[0])
        self._send(one, (PREFACE + frame(SETTINGS, 0, 0),))
        return one

    def _encrypted(self, stack: ExitStack, port: int) -> socket.socket:
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        return stack.enter_context(self._tls.wrap_socket(raw, server_hostname="127.0.0.1"))

    def _send(self, one: socket.socket, parts: Iterable[bytes]) -> None:
        """Send until the other side has had enough."""
        with suppress(OSError):
            for part in parts:
                one.sendall(part)
