"""A lane's end of its channel to the server."""

import socket

from serve.ipc import messages, passing


class LaneChannel:
    """A socket that carries one message a packet."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def send(self, message: messages.FromLane) -> None:
        """Send a message to the server."""
        self._channel.send(messages.encode(message))

    def receive(self) -> messages.ToLane | None:
        """Wait for the next message; returns None when the server is gone."""
        return passing.receive(self._channel)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._channel.fileno()

    def is_idle(self) -> bool:
        """Return True when no message waits to be read."""
        try:
            self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        return False
