"""Messages and keys of the link by which servers give each other rows of features and of edges.

A message has a head, and ids or rows in frames of their own. With a key, CURVE encrypts all of it,
and a server hears those alone who have the key.
"""

import hashlib
import hmac
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils import z85

#: Bytes of rows that one message asks for, about, and most bytes of any message.
PIECE_BYTES, MOST_BYTES = 4 << 20, 16 << 20
#: Most bytes of ids in a message.
MOST_ID_BYTES = 1 << 20
#: Dtypes that rows of features are stored in, and ids of nodes that were drawn.
DTYPES, ID_DTYPES = ("float32", "float16", "uint8"), ("int32", "int64")
#: Time for a connection to say who it is.
_HANDSHAKE_MS = 1000
#: Where `beats`: how often the other end is asked whether it is there, and how long it may not say.
_HEARTBEAT_MS, _SILENT_MS = 1000, 5000


class RowsAsked(msgspec.Struct, frozen=True, array_like=True):
    """Head of a message that asks for rows; their ids follow, int64."""

    #: Chosen by who asks, and comes back with the answer.
    number: int
    graph: str
    files: bytes
    changes: bytes
    #: In-neighbours that each of them draws, all where it is -1; 0 where features are asked for.
    fanout: int = 0
    #: What it draws by, see ``graphs.shared_sampling``.
    hop_seed: int = 0


class RowsGiven(msgspec.Struct, frozen=True, array_like=True):
    """Head of its answer; the rows follow.

    Of nodes that draw they are lengths, int32, and the ids of all rows one after the other. They
    may be of the first nodes alone, as many as a message holds; at least of one.
    """

    number: int
    dtype: str
    #: Why there are no rows; empty where there are.
    failure: str = ""
    #: There may be rows soon: who asks knows of a change that is not made here yet.
    later: bool = False


class Keys(NamedTuple):
    """A pair of keys for CURVE, the same on all servers, which have the secret in common."""

    public: bytes
    secret: bytes

    @classmethod
    def of(cls, shared: str) -> "Keys":
        """Derive them from what the servers share."""
        raw = hmac.new(shared.encode(), b"gnnserve rows of features", hashlib.sha256).digest()
        secret = z85.encode(raw)
        return cls(zmq.curve_public(secret), secret)


def secure(
    socket: "zmq.Socket[bytes]", keys: Keys | None, *, listens: bool, beats: bool = False
) -> None:
    """Have the socket, before it binds or connects, take and send nothing without the keys.

    With `beats` the connection ends when the other machine falls silent, as one without power does.
    """
    socket.linger = 0
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.maxmsgsize = MOST_BYTES
    if beats:
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENT_MS
    if keys is None:
        return
    socket.curve_publickey, socket.curve_secretkey = keys
    if listens:
        socket.curve_server = True
    else:
        socket.curve_serverkey = keys.public
