"""Packets to lanes together with the files that they name.

The server's copies of a model's files have no name. A message that names some takes their
descriptors along, so a lane can open these copies and nothing else of the server's.
"""

import array
import os
import re
import socket
from contextlib import suppress

import msgspec

from serve.ipc import messages
from serve.ipc.messages import MAX_PACKET_BYTES, LoadModel, Message, ProbeModel
from serve.models.repository import ModelSpec

_COPIES = ("copied_weights", "copied_source")
_OF_DESCRIPTOR = re.compile(r"/proc/(?:self|\d+)/fd/(\d+)")


def send(channel: socket.socket, message: Message, flags: int = 0) -> None:
    """Send a message with the descriptors of the copies that it names; raises OSError."""
    fds = () if not isinstance(message, LoadModel | ProbeModel) else copies_of(message.spec)
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([messages.encode(message)], control, flags)


def receive(channel: socket.socket) -> messages.ToLane | None:
    """Wait for a message to a lane; returns None when the server is gone.

    Paths of copies in it are those of this process, which owns their descriptors, see `close`.
    """
    packet, fds, _, _ = socket.recv_fds(
        channel, MAX_PACKET_BYTES, len(_COPIES), socket.MSG_CMSG_CLOEXEC
    )
    if not packet:
        return None
    message = messages.decode_to_lane(packet)
    if isinstance(message, LoadModel | ProbeModel):
        named = [name for name in _COPIES if _descriptor(getattr(message.spec, name)) is not None]
        ours = {name: f"/proc/self/fd/{fd}" for name, fd in zip(named, fds, strict=True)}
        message = msgspec.structs.replace(
            message, spec=msgspec.structs.replace(message.spec, **ours)
        )
    return message


def copies_of(spec: ModelSpec) -> tuple[int, ...]:
    """Return the descriptors, in this process, of the copies of the model's files."""
    found = (_descriptor(getattr(spec, name)) for name in _COPIES)
    return tuple(fd for fd in found if fd is not None)


def close_copies(spec: ModelSpec) -> None:
    """Close the copies of a model that this process has received and needs no more."""
    for fd in copies_of(spec):
        with suppress(OSError):  # a model has closed it
            os.close(fd)


def _descriptor(path: str) -> int | None:
    match = _OF_DESCRIPTOR.fullmatch(path)
    return None if match is None else int(match[1])
