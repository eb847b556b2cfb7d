"""The files of a page: its HTML and its parts."""

from collections.abc import Iterable
from pathlib import Path as FilePath

from starlette.requests import Request

from serve.rest.documentation import PAGE_POLICY
from serve.rest.errors import RestError
from serve.rest.replies import HttpReply, Path

_TYPES = {
    "html": "text/html", "css": "text/css", "js": "text/javascript", "LICENSE": "text/plain"
}  # fmt: skip


class PageFiles:
    """Handlers of a page at `/` and of its parts, which are read once."""

    def __init__(self, page: str, folders: Iterable[FilePath]) -> None:
        """`page` is the name of the page's file in one of the folders."""
        self._page = page
        self._files = {
            file.name: file.read_bytes() for folder in folders for file in folder.iterdir()
        }

    def table(self) -> list[Path]:
        """Return all paths."""
        return [
            Path("GET", "/", self.page),
            Path("GET", "/live/assets/{asset}", self.asset),
        ]

    async def page(self, request: Request) -> HttpReply:
        """Return the page."""
        return self._file(self._page)

    async def asset(self, request: Request) -> HttpReply:
        """Return a part of the page."""
        name = request.path_params["asset"]
        if name not in self._files:
            raise RestError(404, f"nothing at {request.scope['path']}")
        return self._file(name)

    def _file(self, name: str) -> HttpReply:
        kind = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        return HttpReply(self._files[name], kind, headers=PAGE_POLICY)
