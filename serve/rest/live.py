"""The live page at `/`: the page and its parts, its stream of numbers, and what it looks up.

The gateway serves it, not the main process, which writes buckets of time to the report's database
in any case: a viewer costs the process that schedules nothing.

uPlot draws the lines: MIT licence, 50 KB without further parts, and a plot of 300 points in a
millisecond. `uplot.js` is release 1.6.32 as published; its licence lies beside it.
"""

from pathlib import Path as FilePath
from typing import Any

import msgspec
from starlette.requests import Request

from serve.obs.live.story import requests_between, story_of
from serve.obs.live.view import WINDOWS, Focus
from serve.obs.selection import Selection
from serve.rest.errors import invalid
from serve.rest.feed import Feed
from serve.rest.page_files import PageFiles
from serve.rest.replies import HttpReply, Path, as_json

ASSETS = FilePath(__file__).parent / "assets" / "live"
_NAMES = ("model", "version", "tenant")
#: Longest time whose requests are listed.
_MOST_S = 86_400
#: Latest times that the database's integers hold, as nanoseconds.
_LAST_S, _LAST_US = (2**63 - 1) // 10**9, 2**63 // 1000 - 1


class LivePage:
    """Handlers of the live page."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._files = PageFiles("live.html", (ASSETS,))

    def table(self) -> list[Path]:
        """Return all paths."""
        return [
            *self._files.table(),
            Path("GET", "/live/events", self.events),
            Path("GET", "/live/requests", self.requests),
            Path("GET", "/live/requests/{uid}", self.story),
        ]

    async def events(self, request: Request) -> HttpReply:
        """Return the numbers of a view once a second, as server-sent events."""
        names = _texts(request, ("window", *_NAMES))
        focus = Focus(**{"window": "5m"} | names)
        if focus.window not in WINDOWS:
            known = ", ".join(WINDOWS)
            raise invalid(f"window={focus.window[:64]!r}: known windows are {known}")
        if focus.tenant and focus.model:
            raise invalid("model and tenant exclude each other; give one of them")
        if focus.version and not focus.model:
            raise invalid("version needs model")
        return HttpReply(b"", "text/event-stream", stream=self._feed.watch(focus))

    async def requests(self, request: Request) -> HttpReply:
        """Return the requests that ended between `from` and `until`, seconds since the epoch."""
        filters = _texts(request, ("from", "until", *_NAMES, "cause"))
        begin_s, end_s = (
            _number(name, filters.pop(name, ""), _LAST_S) for name in ("from", "until")
        )
        if not 0 < end_s - begin_s <= _MOST_S:
            raise invalid(f"until must lie after from, by at most {_MOST_S} s")
        chosen = msgspec.convert(filters, Selection)
        count, found = await self._feed.ask(lambda db: requests_between(db, chosen, begin_s, end_s))
        return _json({"count": count, "requests": found})

    async def story(self, request: Request) -> HttpReply:
        """Return the story of a request; `at`, its arrival in µs, makes the search short."""
        uid = request.path_params["uid"]
        at = _number("at", request.query_params.get("at", "0"), _LAST_US)
        return _json(await self._feed.ask(lambda db: story_of(db, uid, at)))


def _texts(request: Request, names: tuple[str, ...]) -> dict[str, str]:
    """Return the parameters of the query that are not empty; raises RestError for others."""
    given = dict(request.query_params)
    if unknown := sorted(set(given) - set(names)):
        known = ", ".join(names)
        raise invalid(f"unknown parameter {unknown[0][:64]!r}; known parameters: {known}")
    return {name: value for name, value in given.items() if value}


def _number(name: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > most:
        raise invalid(f"{name}={text[:64]!r}: it must be a whole number, at most {most}")
    return int(text)


def _json(value: Any) -> HttpReply:
    return as_json(msgspec.to_builtins(value))
