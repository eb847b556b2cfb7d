"""The paths that show and change which versions of models answer requests that name none."""

from typing import Any

import msgspec
from starlette.requests import Request

from serve.pb import gnnserve_pb2
from serve.rest.backend import PROBE_S, Backend
from serve.rest.bodies import BodyReader
from serve.rest.errors import invalid
from serve.rest.json_messages import plain
from serve.rest.replies import HttpReply, Path, as_json, model_of
from serve.rest.small_bodies import small_body

_PATH = "/v2/repository/models/{model}/versions"


class VersionsBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a change: one of `split`, with `canary`; `shadow`, with its share; `roll_back`."""

    split: dict[str, float] | None = None
    canary: int = 0
    shadow: int | None = None
    shadow_percent: float = 100.0
    roll_back: bool = False


class VersionPaths:
    """Handlers for the versions of models."""

    def __init__(self, backend: Backend, bodies: BodyReader) -> None:
        self._backend, self._bodies = backend, bodies

    def table(self) -> list[Path]:
        """Return all paths."""
        return [
            Path("GET", "/v2/repository/versions", self.listed),
            Path("GET", _PATH, self.listed),
            Path("POST", _PATH, self.change, VersionsBody),
        ]

    async def listed(self, request: Request) -> HttpReply:
        """Tell which versions answer requests that name none, of one model or of all."""
        name = model_of(request)[0] if "model" in request.path_params else ""
        wanted = gnnserve_pb2.ListVersionsRequest(model=name)
        found = await self._backend.call(self._backend.own.ListVersions, wanted, PROBE_S)
        models = [plain(model) for model in found.models]
        return as_json(models[0] if name else {"models": models})

    async def change(self, request: Request) -> HttpReply:
        """Change which versions of a model answer requests that name none."""
        body = await small_body(self._bodies, request, VersionsBody)
        wanted = _change_of(model_of(request)[0], body)
        found = await self._backend.call(self._backend.own.ChangeVersions, wanted, PROBE_S)
        return as_json(plain(found.model))


def _change_of(model: str, body: VersionsBody) -> gnnserve_pb2.ChangeVersionsRequest:
    """Return the message for the body; raises RestError."""
    if sum((body.split is not None, body.shadow is not None, body.roll_back)) != 1:
        raise invalid("body: give one of split, shadow and roll_back")
    change: dict[str, Any] = {"roll_back": True}
    if body.split is not None:
        shares = {_version(key): percent for key, percent in body.split.items()}
        canary = _version(str(body.canary)) if body.canary else 0
        change = {"split": gnnserve_pb2.Split(shares=shares, canary=canary)}
    elif body.shadow is not None:
        shadow = _version(str(body.shadow)) if body.shadow else 0
        percent = body.shadow_percent
        if not percent > 0:  # which would mean all requests to gRPC
            raise invalid(f"shadow_percent: {percent} is not above 0; a shadow of 0 ends it")
        change = {"shadow": gnnserve_pb2.Shadow(version=shadow, percent=percent)}
    return gnnserve_pb2.ChangeVersionsRequest(model=model, **change)


def _version(text: str) -> int:
    """Return the number of a version; raises RestError."""
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 18 and text[0] != "0"):
        raise invalid(f"version '{text[:100]}': it is no positive integer below 10^18")
    return int(text)
