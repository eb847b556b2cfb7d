"""A lane's end of its channel to the server."""

import socket

from serve.ipc import messages
from serve.ipc.messages import MAX_PACKET_BYTES


class LaneChannel:
    """A socket that carries one message a packet."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def send(self, message: messages.FromLane) -> None:
        """Send a message to the server."""
        self._channel.send(messages.encode(message))

    def receive(self) -> messages.ToLane | None:
        """Wait for the next message; returns None when the server is gone."""
        packet = self._channel.recv(MAX_PACKET_BYTES)
        return messages.decode_to_lane(packet) if packet else None

    def is_idle(self) -> bool:
        """Return True when no message waits to be read."""
        try:
            self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        return False
