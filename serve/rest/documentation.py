"""The API's description: `/openapi.json`, and `/docs`, a page that shows it and tries it.

The page and its parts come from this server alone, and it may reach nothing else.
"""

from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path as FilePath
from typing import Any

from starlette.requests import Request

from serve.pb import grpc_service_pb2 as pb
from serve.rest.backend import PROBE_S, Backend
from serve.rest.errors import RestError
from serve.rest.openapi import describe, example_request
from serve.rest.replies import HttpReply, Path, as_json

_ASSETS = FilePath(__file__).parent / "assets"
_TYPES = {
    "docs.html": "text/html; charset=utf-8",
    "docs.css": "text/css; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
}
#: Headers of pages and their parts: they may reach this server alone.
PAGE_POLICY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
#: Most models that have an example.
_MOST_EXAMPLES = 32


class Documentation:
    """Handlers of the documentation."""

    def __init__(self, backend: Backend, described: Sequence[Path]) -> None:
        self._backend = backend
        self._described = tuple(described)
        self._assets = {name: (_ASSETS / name).read_bytes() for name in _TYPES}

    def table(self) -> list[Path]:
        """Return all paths."""
        return [
            Path("GET", "/docs", self.page),
            Path("GET", "/docs/{asset}", self.asset),
            Path("GET", "/openapi.json", self.openapi),
        ]

    async def page(self, request: Request) -> HttpReply:
        """Return the page."""
        return HttpReply(self._assets["docs.html"], _TYPES["docs.html"], headers=PAGE_POLICY)

    async def asset(self, request: Request) -> HttpReply:
        """Return a part of the page."""
        name = request.path_params["asset"]
        if name not in self._assets:
            raise RestError(HTTPStatus.NOT_FOUND, f"nothing at {request.scope['path']}; see /docs")
        return HttpReply(self._assets[name], _TYPES[name], headers=PAGE_POLICY)

    async def openapi(self, request: Request) -> HttpReply:
        """Return the description, with an example for each model that is ready."""
        return as_json(describe(self._described, await self._examples()))

    async def _examples(self) -> dict[str, Any]:
        wanted = pb.RepositoryIndexRequest(ready=True)
        standard = self._backend.standard
        index = await self._backend.call(standard.RepositoryIndex, wanted, PROBE_S)
        names = sorted({model.name for model in index.models})[:_MOST_EXAMPLES]
        return {name: example_request(await self._backend.model_config(name, "")) for name in names}
