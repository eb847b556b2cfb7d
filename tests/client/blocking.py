"""The asyncio client with the interface of the one for threads, so that a test holds for both."""

import asyncio

from serve.client import AsyncClient


class Blocking:
    """Gives an `AsyncClient` the interface of a `Client`."""

    def __init__(self, target, **options):
        self._runner = asyncio.Runner()
        try:
            self._client = self._runner.run(self._make(target, options))
        except BaseException:
            self._runner.close()
            raise

    async def _make(self, target, options):
        return AsyncClient(target, **options)

    def __enter__(self):
        self._runner.run(self._client.__aenter__())
        return self

    def __exit__(self, *error):
        self._runner.run(self._client.__aexit__(*error))
        self._runner.close()

    def __getattr__(self, name):
        method = getattr(self._client, name)
        if name == "infer_stream":
            return lambda requests, **options: self._runner.run(
                collect(method(requests, **options))
            )
        return lambda *args, **kwargs: self._runner.run(method(*args, **kwargs))


async def collect(items):
    return [item async for item in items]
