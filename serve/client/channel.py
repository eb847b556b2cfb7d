"""Channel options and input names that both clients use."""

from serve.client.requests import Request
from serve.inputs import INPUTS

#: Inputs that every graph request has, and inputs that only some models take.
REQUIRED = tuple(name for name, each in INPUTS.items() if each.always)
OPTIONAL = tuple(name for name, each in INPUTS.items() if not each.always)


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return channel arguments with the message limit for both directions."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def must_ask(request: Request) -> bool:
    """Return True when the request's `data` has an input that the model may not take."""
    return any(getattr(request.data, name, None) is not None for name in OPTIONAL)
