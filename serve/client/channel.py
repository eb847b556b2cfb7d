"""What both clients set up alike."""

from serve.client.requests import Request
from serve.inputs import INPUTS

#: Inputs every graph request has, and those that only some models take.
REQUIRED = tuple(name for name, each in INPUTS.items() if each.always)
OPTIONAL = tuple(name for name, each in INPUTS.items() if not each.always)


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Channel arguments: what the server takes by default, each way."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def must_ask(request: Request) -> bool:
    """Whether its `data` has something that the model may not take."""
    return any(getattr(request.data, name, None) is not None for name in OPTIONAL)
