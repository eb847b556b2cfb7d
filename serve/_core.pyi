"""Compiled part of gnnserve; use it through serve.native."""

from collections.abc import Sequence

import serve.native


def stage_indices(src: serve.native.BytesLike, is_int32: bool, bound: int, dst: serve.native.BytesLike, narrow: bool = False) -> int: ...

def stage_features(src: serve.native.BytesLike, dst: serve.native.BytesLike, check_finite: bool) -> int: ...

def define_operators() -> None: ...

def use_device_operators(path: str) -> None: ...

def define_simulated_operators(path: str, library: str) -> None: ...

MOST_HEADS: int = 64

class OffsetAllocator:
    """
    Allocator of ranges of a region that it never touches, such as a shared memory file.

    Best fit: the smallest free range that holds the request, the lowest of equal ones;
    freed ranges merge with their neighbours at once. Not thread-safe.
    """

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        """
        `alignment` is a power of two; the capacity is rounded down to a multiple of it.
        """

    def alloc(self, size: int) -> int:
        """
        Return the offset of a range of at least `size` bytes, or -1 without a free one.

        An empty range takes one alignment unit, so that offsets are unique.
        Raises ValueError for a negative size.
        """

    def free(self, offset: int) -> None:
        """Free a range; raises ValueError when none was handed out at `offset`."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the region."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use, each range rounded up to the alignment."""

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest request that would succeed now."""

def read_arriving(socket: int, dst: serve.native.BytesLike) -> tuple[int, bool]: ...

class Topology:
    """
    In-neighbours by destination, and rows that changed since; holds its buffers.
    """

    def __init__(self, num_nodes: int, indptr: serve.native.BytesLike, indices: serve.native.BytesLike, is_int32: bool, patched: serve.native.BytesLike, patched_indptr: serve.native.BytesLike, patched_indices: serve.native.BytesLike) -> None: ...

class SeedPlaces:
    """Where the requested nodes are in a sampled subgraph."""

    @property
    def num_seeds(self) -> int:
        """Number of distinct requested nodes."""

    def write_positions(self, target: serve.native.BytesLike) -> None:
        """Write the local id of each requested id, int64."""

class Sample(SeedPlaces):
    """A sampled subgraph."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes; the requested ones come first."""

    @property
    def num_edges(self) -> int:
        """Number of edges; they are sorted by destination."""

    def write_nodes(self, target: serve.native.BytesLike) -> None:
        """Write the node of each local id, int64."""

    def write_edges(self, target: serve.native.BytesLike, is_int32: bool) -> None:
        """Write the edges [2, E] in local ids, int32 or int64."""

class TypedSample(SeedPlaces):
    """A sampled subgraph with nodes and edges of several types."""

    def num_nodes(self, type: int) -> int:
        """Return the number of nodes of a type; the requested ones come first."""

    def num_edges(self, relation: int) -> int:
        """Return the number of edges of a relation, sorted by destination."""

    def write_nodes(self, type: int, target: serve.native.BytesLike) -> None:
        """Write the node of each local id of a type, int64."""

    def write_edges(self, relation: int, target: serve.native.BytesLike, is_int32: bool) -> None:
        """Write the edges [2, E] of a relation in local ids, int32 or int64."""

def sample_typed(rows: Sequence[Topology], ends: Sequence[tuple[int, int]], keys: Sequence[int], num_nodes: Sequence[int], type: int, ids: serve.native.BytesLike, fanouts: Sequence[int], seed: int) -> TypedSample: ...

def sample_neighbours(topology: Topology, ids: serve.native.BytesLike, fanouts: Sequence[int], seed: int) -> Sample: ...

def build_rows(edges: serve.native.BytesLike, is_int32: bool, num_sources: int, num_nodes: int, indptr: serve.native.BytesLike, indices: serve.native.BytesLike, narrow: bool) -> int: ...

def gather_rows(rows: serve.native.BytesLike, dtype: str, width: int, patched: serve.native.BytesLike, patched_rows: serve.native.BytesLike, ids: serve.native.BytesLike, target: serve.native.BytesLike) -> None: ...

class BlockPool:
    """
    Allocator of ranges of a writable buffer, for several threads; see OffsetAllocator.
    """

    def __init__(self, memory: memoryview, capacity_bytes: int, alignment: int) -> None:
        """
        Allocate from the first `capacity_bytes` of `memory`, which it holds until it is
        closed and every block is freed.
        """

    def alloc(self, size: int) -> int:
        """See OffsetAllocator."""

    def free(self, offset: int) -> None:
        """See OffsetAllocator."""

    @property
    def used_bytes(self) -> int:
        """See OffsetAllocator."""

    def close(self) -> None:
        """Let go of the memory once no block is left."""

class Message:
    """A call's message; a buffer of its bytes."""

class PlainModel:
    """What the front must know of a model to stage its plain requests."""

    def __init__(self, *, token: int, counts: int, node_counts: int, narrow_edges: bool = False, counts_loops: bool = False) -> None:
        """
        Describe a model without inputs and outputs.

        A request's shapes tell `counts` numbers; the first `node_counts` are of nodes. With
        `narrow_edges` INT32 edges stay so; with `counts_loops` self-loops are counted. Both
        need the second count to be that of edges.
        """

    def add_input(self, name: str, datatype: str, shape: list[int], *, required: bool, also_int32: bool = False, below: list[int] = [], low: int = 0, high: int = 1, numbers_graphs: bool = False, counts_graphs: bool = False, ascends: bool = False) -> None:
        """
        Add the next input. A size of its shape that is the n-th count is -1 - n.

        Values of indices are `below` these counts, one for each row or one for all; those of
        other integers are in [low, high]. With `numbers_graphs` the largest is told, with
        `counts_graphs` the sizes of graphs. With `ascends` no value is less than the one
        before it. Raises ValueError for what cannot be.
        """

    def add_output(self, name: str, constant: float, per: list[float]) -> None:
        """
        Add the next output, of at most constant + Σ per · count bytes. Raises
        ValueError.
        """

class PlainRequest:
    """A request whose tensors the front has staged."""

    @property
    def token(self) -> int:
        """Token of its model."""

    @property
    def version(self) -> str:
        """Version asked for; empty for the default."""

    @property
    def client_id(self) -> str:
        """Id given by the client."""

    @property
    def parameters(self) -> dict[str, bool | int | str | float]:
        """Parameters of the request by name."""

    @property
    def counts(self) -> tuple[int, ...]:
        """The model's counts, as its shapes tell them."""

    @property
    def largest(self) -> dict[str, int]:
        """
        Largest value, by name, of each index that numbers graphs and has values.
        """

    @property
    def graph_sizes(self) -> dict[str, tuple[int, int, int]]:
        """
        By name of each index of which they are counted: pairs of things in one graph,
        each with itself, graphs, and things of the largest.
        """

    @property
    def wanted(self) -> list[str]:
        """Names of the outputs asked for; empty for all."""

    @property
    def num_loops(self) -> int | None:
        """Self-loops among the edges; None where its model's are not counted."""

    @property
    def narrow_edges(self) -> bool:
        """Edges are staged as int32."""

    @property
    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Name, dtype, shape and offset in the pool of each tensor."""

    @property
    def output_offset_bytes(self) -> int:
        """Place of the outputs in the pool."""

    @property
    def output_capacity_bytes(self) -> int:
        """Size of the outputs' place."""

    @property
    def block_bytes(self) -> int:
        """Size of its block."""

    @property
    def valid(self) -> bool:
        """
        Whether the model can take every value; if not, the message is to be refused in words.
        """

    def stage(self) -> bool:
        """
        Put the tensors in their places again, as a model may have worked in place.

        Returns False when it has, and the message was too large to be kept.
        """

    def release(self) -> None:
        """Free the block as soon as nothing is sent from it."""

    def message(self) -> Message:
        """
        Return the serialized message, written again from what is staged. Not after `release`.
        """

def front_lacks() -> str:
    """
    Return why the native front cannot run on this machine; empty when it can.
    """

def tls_lacks() -> str:
    """
    Return why the native front cannot encrypt on this machine; empty when it can.
    """

class TlsContext:
    """A server's certificate and key, for connections that begin."""

    def __init__(self, certificate: str, key: str, client_ca: str = '') -> None:
        """
        Read files in PEM format. With `client_ca`, clients must show a certificate of its
        authorities. Raises RuntimeError when the files, or the library, cannot be used.
        """

class Front:
    """
    HTTP/2 and gRPC for clients on one thread, which polls it.

    Unary calls of `method` and messages of streams of `stream_method` come out
    of `poll`; all others go to the gRPC server on the Unix socket
    `backend`. Plain requests of the models of `set_models` are staged in `pool`.

    With `asks` a call waits, once its headers are there, until `admit` or `fail`. Calls of
    the same method and credentials on the same connection do not wait again, but those
    of `stream_method`.

    With `tls` connections are encrypted, but those to the abstract Unix socket
    `inside`, which takes processes of this user. The headers `certified` are
    added to calls of clients that show a certificate, whose alternative names
    are the second one's value.
    """

    def __init__(self, *, host: str, port: int, backend: str, method: str, stream_method: str = '', max_open_streams: int = 64, stream_window: int = 256, unread_timeout_s: float = 10.0, max_message_bytes: int, max_receiving_bytes: int, max_receiving_bytes_of_connection: int, max_connections: int, max_connections_of_peer: int, max_streams: int, receive_timeout_s: float, receive_bytes_per_s: int, send_timeout_s: float, pool: BlockPool | None = None, check_finite: bool = True, asks: bool = False, tls: TlsContext | None = None, inside: str = '', certified: Sequence[tuple[str, str]] = []) -> None:
        """
        Listen. Raises OSError when the address cannot be had, RuntimeError when the
        library is missing.
        """

    @property
    def port(self) -> int:
        """The port it listens on."""

    def poll(self, until_ns: int) -> tuple[bool, list[tuple[int, bytes]], list[tuple[int, Message | PlainRequest | str | None, int, int, int, list[tuple[str, str]] | None, int, bool, str, int]]]:
        """
        Serve until something has to be decided, `wake` is called, or the monotonic clock
        shows `until_ns` (negative: no limit). One thread at a time.

        Returns whether the descriptor of `watch_also` is readable; the packets of
        `watch_packets` by descriptor, empty when the other end is closed; and a few events:
        (handle, request, began_ns, timeout_ns, arrived_ns, credentials, stream, raises,
        traceparent, calls)
        for a call, or a message of a stream, that was complete at arrived_ns;
        (handle, method, …) for a call that waits for `admit`, which for one of
        `stream_method` has its handle in `stream`, too; (handle, None, …) when it has ended,
        answered or not, or a stream that was asked for has. The request is a Message
        unless it is staged. stream is the handle of a message's stream, 0 for a call. timeout_ns counts from began_ns; it is negative for a call
        without one. The credentials are the headers that tell whom the call comes from,
        None when there are none; a stream's messages have none. In a stream an error is
        for `tell`, unless `raises`; `fail` ends the whole stream. traceparent is that header of
        the call or its stream, empty without. calls is the number of calls that wait for the
        same `admit` or `fail`, else 1.
        """

    def flush(self) -> None:
        """Send what was answered, without waiting. For the thread that polls."""

    def watch_also(self, fd: int) -> None:
        """Have `poll` watch a descriptor too; -1: none. Not while it runs."""

    def watch_packets(self, fd: int) -> None:
        """
        Have `poll` read the packets of a SEQPACKET socket, one at a time. Not while it
        runs.
        """

    def unwatch_packets(self, fd: int) -> None:
        """Have `poll` leave the socket alone. Not while it runs."""

    def set_tls(self, tls: TlsContext) -> None:
        """Begin connections with these certificates from now on. Any thread."""

    def set_models(self, models: list[tuple[str, str, PlainModel]]) -> None:
        """
        Stage plain requests of these models from now on: name, version, what it takes.
        The default version is given once more with an empty one. Any thread.
        """

    def answer(self, handle: int, message: bytes) -> None:
        """
        Answer a call with a serialized message. Any thread; nothing happens when the call
        has ended.
        """

    def answer_staged(self, handle: int, head: bytes, request: PlainRequest, outputs: list[tuple[int, int]]) -> None:
        """
        Answer a call with the message `head`, and as its raw contents these places in the
        pool, offset and size of each, within that of the request's outputs. Its block stays
        until they are sent.
        """

    def fail(self, handle: int, code: int, text: str, retry_after_ms: int = -1) -> None:
        """End a call with a status code of gRPC. Any thread."""

    def admit(self, handle: int) -> None:
        """Have a call go on that waits for it. Any thread."""

    def finish(self, handle: int, code: int, text: str) -> None:
        """
        Read no more of a stream, and end it with a status code of gRPC once its requests
        are answered. Any thread.
        """

    def forget_admitted(self) -> None:
        """Have each kind of call wait for `admit` once more. Any thread."""

    def tell(self, handle: int, message: bytes) -> None:
        """
        Send a message of a stream in place of an answer to one of its requests. Any thread.
        """

    def wake(self) -> None:
        """Make `poll` return. Any thread."""

    def announce_end(self) -> None:
        """
        Tell all clients to begin no more calls on their connections. Any thread.
        """

    def counts(self) -> dict[str, int]:
        """Return the counters of calls, refusals and connections, by name."""

    def close(self) -> None:
        """End all connections. No thread may poll."""

def decode_infer(is_request: bool, message: bytes | memoryview) -> serve.native.Infer | None: ...

def encode_infer(is_request: bool, model: str, version: str, id: str, parameters: serve.native.Parameters, tensors: Sequence[serve.native.TensorHead], raws: Sequence[memoryview]) -> bytes | None: ...

def cut_json_lists(document: serve.native.BytesLike, depth: int, key: str) -> tuple[bytes, list[tuple[int, int]]]: ...

def shape_of_json_list(text: serve.native.BytesLike, most: int) -> list[int]: ...

def read_json_list(text: serve.native.BytesLike, code: str, shape: Sequence[int], dst: serve.native.BytesLike) -> None: ...

def write_json_list(src: serve.native.BytesLike, code: str, shape: Sequence[int]) -> bytes: ...

class LoadSender:
    """
    Sends requests to one server and notes when each was answered, on the calling thread.

    gRPC over HTTP/2 connections that take requests in turn; with `http`, POST over at most
    `connections` of HTTP/1.1, one request each. A request that has no answer `timeout_s`
    after it was due ends with DEADLINE_EXCEEDED, one whose connection is lost with
    UNAVAILABLE. Connections are opened anew.
    """

    def __init__(self, *, host: str, port: int, path: str, http: bool = False, connections: int = 1, timeout_s: float = 30.0, connect_timeout_s: float = 10.0, whole_answers: bool = False) -> None: ...

    def send_at(self, messages: Sequence[bytes], offsets_ns: Sequence[int]) -> None:
        """
        Send each message so long after the start (open loop); offsets ascend.

        Returns when all have ended, or after `stop`. Raises OSError when nobody takes a
        connection at first, RuntimeError when libnghttp2 is missing, ValueError when
        messages and offsets do not fit together.
        """

    def keep_in_flight(self, messages: Sequence[bytes], in_flight: int, duration_s: float, most: int = 1000000) -> None:
        """
        Keep requests in flight, messages in turn, for a time or until `most` were sent
        (closed loop). Returns and raises as `send_at` does.
        """

    def take(self) -> tuple[bytes, list[bytes], list[str]]:
        """
        Return the results since the last call, in the order of ending. Any thread.

        Rows of six int64: number of the request, when it was due, sent and ended on the
        monotonic clock, status code of gRPC, bytes of the answer. Then each answer (its
        fields before the raw contents, unless `whole_answers`), and each error's text.
        """

    def stop(self) -> None:
        """
        End the run, now and for good; requests in flight have no result. Any thread.
        """

    @property
    def started_ns(self) -> int:
        """When the last run began, on the monotonic clock; 0 before the first."""

    @property
    def sent(self) -> int:
        """Number of requests sent in the last run."""

def sqlite_version() -> str: ...

class SqlRows:
    def __init__(self, path: str, query: str, values: Sequence[int | str], texts: int) -> None: ...

    @property
    def columns(self) -> int: ...

    def read(self, dst: serve.native.BytesLike) -> int: ...

    def names(self, column: int) -> list[bytes]: ...
