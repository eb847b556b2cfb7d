"""Bound on the bytes of bodies and answers that the gateway holds."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BudgetExhausted(Exception):
    """The bytes were not free in time."""


class ByteBudget:
    """Hands out bytes up to a total, first come first served. For one event loop."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._free_bytes = total_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes that are handed out now."""
        return self.total_bytes - self._free_bytes

    @asynccontextmanager
    async def holding(self, size_bytes: int, limit_s: float) -> AsyncIterator[None]:
        """Hold `size_bytes` inside the block; waits for them at most `limit_s`.

        Raises BudgetExhausted. Anything larger than the total counts as the total.
        """
        size_bytes = min(size_bytes, self.total_bytes)
        await self._take(size_bytes, limit_s)
        try:
            yield
        finally:
            self._give(size_bytes)

    async def _take(self, size_bytes: int, limit_s: float) -> None:
        if not self._waiting and size_bytes <= self._free_bytes:
            self._free_bytes -= size_bytes
            return
        had: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = size_bytes, had
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(limit_s):
                await had
        except BaseException as error:
            if had.done() and not had.cancelled():
                self._free_bytes += size_bytes
            elif entry in self._waiting:  # else others were served since it was cancelled
                self._waiting.remove(entry)
            self._serve_waiting()
            if isinstance(error, TimeoutError):
                raise BudgetExhausted from error
            raise

    def _give(self, size_bytes: int) -> None:
        self._free_bytes += size_bytes
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free_bytes:
            size_bytes, had = self._waiting.popleft()
            if not had.cancelled():
                self._free_bytes -= size_bytes
                had.set_result(None)
