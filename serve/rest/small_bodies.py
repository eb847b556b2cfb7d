"""Small bodies: those of all requests but inference."""

from http import HTTPStatus
from typing import TypeVar

import msgspec
from starlette.requests import Request

from serve.rest.bodies import BodyReader
from serve.rest.errors import RestError
from serve.rest.inference import parse_json

#: Largest of these bodies.
_MOST_BYTES = 64 * 1024

_Body = TypeVar("_Body")


async def small_body(bodies: BodyReader, request: Request, kind: type[_Body]) -> _Body:
    """Receive and decode a small body; an empty one is an empty object. Raises RestError."""
    async with bodies.received(request) as body:
        if len(body) > _MOST_BYTES:
            raise RestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"body: {len(body)} bytes, at most {_MOST_BYTES} are taken here",
            )
        found: _Body = parse_json(msgspec.json.Decoder(kind), bytes(body).strip() or b"{}")
        return found
