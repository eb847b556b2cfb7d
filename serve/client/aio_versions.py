"""Versions of models for an asyncio client, from which ``sync_versions`` is generated."""

from collections.abc import Mapping

from serve.client.aio_connection import AsyncTransport
from serve.client.aio_inference import AsyncRequester
from serve.client.errors import InvalidRequest
from serve.client.facts import VersionsFacts
from serve.pb import gnnserve_pb2


class AsyncVersions:
    """The client's methods that show and change which versions answer."""

    _connection: AsyncTransport
    _inference: AsyncRequester

    async def versions(self, model: str = "") -> tuple[VersionsFacts, ...]:
        """Return which versions answer requests that name none, of one model or of all loaded."""
        request = gnnserve_pb2.ListVersionsRequest(model=model)
        found = await self._connection.call(self._connection.own.ListVersions, request)
        return tuple(map(VersionsFacts.of, found.models))

    async def split(
        self, model: str, shares: Mapping[str | int, float], *, canary: str | int = ""
    ) -> VersionsFacts:
        """Have versions of a model share the requests that name none, from the next one on.

        Args:
            model: Name of the model.
            shares: Percent of the requests by version, in all 100; one version pins the model to
                it, none means the newest that loads.
            canary: Version among them that loses its share when it does worse than the others.
        """
        split = gnnserve_pb2.Split(
            shares={int(version): percent for version, percent in shares.items()},
            canary=int(canary or 0),
        )
        return await self._change(gnnserve_pb2.ChangeVersionsRequest(model=model, split=split))

    async def shadow(
        self, model: str, version: str | int, *, percent: float = 100.0
    ) -> VersionsFacts:
        """Have a version run requests for the model once more, for nobody; empty to end that.

        Raises InvalidRequest for a share of the requests that is not above 0.
        """
        if not percent > 0:  # which would mean all of them on the wire
            raise InvalidRequest.local(f"percent: {percent} is not above 0; end it by no version")
        shadow = gnnserve_pb2.Shadow(version=int(version or 0), percent=percent)
        return await self._change(gnnserve_pb2.ChangeVersionsRequest(model=model, shadow=shadow))

    async def roll_back(self, model: str) -> VersionsFacts:
        """Go back to the rules for a model's versions before the last change."""
        return await self._change(gnnserve_pb2.ChangeVersionsRequest(model=model, roll_back=True))

    async def _change(self, request: gnnserve_pb2.ChangeVersionsRequest) -> VersionsFacts:
        method = self._connection.own.ChangeVersions
        found = VersionsFacts.of((await self._connection.call(method, request, changes=True)).model)
        self._inference.forget(found.model)
        return found
