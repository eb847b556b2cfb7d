"""Lanes for benches, as in the server: a thread each, two streams, a buffer for each task."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from serve.lane.cuda.arena import LaneMemory
from serve.lane.cuda.cuda_queue import CudaQueue
from serve.lane.cuda.queues import Queue
from serve.lane.cuda.streams import StreamKind

_Found = TypeVar("_Found")


def first_products(device: torch.device) -> None:
    """Let cuBLAS take the tens of MiB that it keeps for this thread and the current stream.

    Otherwise a task's first product would take them from the task's buffer and keep them.
    """
    square = torch.zeros(32, 32, device=device)
    torch.mm(square, square)
    torch.addmm(square[0], square, square)


@contextmanager
def task_in(memory: LaneMemory | None, limit_bytes: int) -> Iterator[None]:
    """Give the task within a buffer of that size; without a memory do nothing.

    Raises RuntimeError when the task has left something in its buffer.
    """
    if memory is None:
        yield
        return
    memory.insert(limit_bytes)
    try:
        yield
    except BaseException:
        memory.clear()
        raise
    if left_bytes := memory.clear():
        raise RuntimeError(f"a task has left {left_bytes} bytes in its buffer")


class Lane:
    """A thread with a queue and memory, which runs tasks one at a time."""

    def __init__(self, queue: Queue, memory: LaneMemory | None) -> None:
        self.queue, self.memory = queue, memory
        #: CUDA's handles of its streams; none on the processor.
        self.streams: list[int] = []
        self._places: dict[tuple[int, ...], torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1)
        self._thread_id = self.call(self._begin)

    def submit(self, work: Callable[..., _Found], *arguments: Any) -> Future[_Found]:
        """Queue the work for the lane's thread."""
        return self._thread.submit(work, *arguments)

    def call(self, work: Callable[..., _Found], *arguments: Any) -> _Found:
        """Return the result of the work in the lane's thread; raises what `work` raises."""
        return self.submit(work, *arguments).result()

    def run(
        self,
        model: Callable[..., torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        limit_bytes: int,
        kind: StreamKind = StreamKind.ORDINARY,
    ) -> torch.Tensor:
        """Run a task as the server's lanes do: up, forward, down. Only in the lane's thread.

        The answer is valid until the next one of its shape. Raises RuntimeError when the task has
        left something in its buffer.
        """
        if threading.get_ident() != self._thread_id:
            raise RuntimeError("a lane's task runs in the lane's thread: see Lane.call")
        with task_in(self.memory, limit_bytes):
            try:
                with self.queue.running(kind), torch.inference_mode():
                    placed = self.queue.upload(inputs)
                    output = model(placed["x"], placed["edge_index"]).contiguous()
                    place = self._place(output)
                    self.queue.download([(output, place)])
                    del placed, output
            except BaseException:
                # The device may still use what the task had; its own error is the one to tell.
                with suppress(Exception):
                    self.queue.finish()
                raise
        return place

    def timed_ms(
        self,
        model: Callable[..., torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        limit_bytes: int,
        kind: StreamKind = StreamKind.ORDINARY,
    ) -> float:
        """Return the milliseconds of ``run``."""
        started = time.perf_counter()
        self.run(model, inputs, limit_bytes, kind)
        return 1e3 * (time.perf_counter() - started)

    def _begin(self) -> int:
        for kind in self.queue.kinds:
            with self.queue.running(kind), torch.inference_mode():
                if isinstance(self.queue, CudaQueue):
                    self.streams.append(self.queue.stream)
                first_products(self.queue.device)
                self.queue.finish()
        return threading.get_ident()

    def _place(self, output: torch.Tensor) -> torch.Tensor:
        shape = tuple(output.shape)
        if shape not in self._places:
            pinned = self.queue.device.type != "cpu"
            self._places[shape] = torch.empty(shape, dtype=output.dtype, pin_memory=pinned)
        return self._places[shape]


def at_once(pieces: Iterable[tuple[Lane, Callable[[], _Found]]]) -> list[_Found]:
    """Return the results once all pieces have ended; raises what one of them raised."""
    futures = [lane.submit(piece) for lane, piece in pieces]
    wait(futures)
    return [future.result() for future in futures]


@contextmanager
def kept_busy(lanes: Sequence[Lane], work: Callable[[Lane], object]) -> Iterator[None]:
    """Keep each lane repeating `work` while open; raises what one of them raised."""
    stop = threading.Event()

    def repeat(lane: Lane) -> None:
        while not stop.is_set():
            work(lane)

    futures = [lane.submit(repeat, lane) for lane in lanes]
    try:
        yield
    finally:
        stop.set()
        wait(futures)
    for future in futures:
        future.result()
