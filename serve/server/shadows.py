"""Shadows: a version runs the requests that another has answered once more, and is compared.

One thread runs them, one at a time, with copies of their inputs. Its tasks are of best effort
(``serve.core.arrivals``): they run only while nothing else is there and are stopped when a request
arrives, so one is tried again until it ran, `_ATTEMPTS` times or for `_KEPT_S` seconds. No client
hears of them and no row of the report is theirs.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from serve.core.versions.router import VersionRouter
from serve.errors import QueueFull, RequestCancelled, ServeError
from serve.server import clock
from serve.server.api import InferCall, InferResult
from serve.server.regions import RegionPart
from serve.server.version_facts import ShadowCounts
from serve.threads import Thread

_log = logging.getLogger(__name__)

#: Requests that wait for their shadow, and bytes of their inputs and outputs; more are skipped.
_MOST_WAITING, _MOST_BYTES = 8, 64 << 20
_ATTEMPTS, _KEPT_S = 50, 30.0
#: Longest wait for the thread's end; what it waits for has ended by then.
_STOP_S = 5.0
#: An output differs when an element is off by more than this share of the greatest one.
TOLERANCE = 1e-3

_Outputs = Mapping[str, np.ndarray[Any, np.dtype[Any]]]


class _Waiting(NamedTuple):
    """A request that was answered, and what it got."""

    call: InferCall
    outputs: _Outputs
    graph_version: int
    size_bytes: int
    until_ns: int


class Shadows:
    """Runs shadows and counts how they compare. Any thread may call any method."""

    def __init__(
        self,
        router: VersionRouter,
        run: Callable[[InferCall], InferResult],
        tell_when_idle: Callable[[Callable[[], None] | None], None],
    ) -> None:
        """`run` runs a call with best effort; raises QueueFull or RequestCancelled to try again.

        `tell_when_idle` is given what is to be called whenever the last request has ended, or None.
        """
        self._router, self._run, self._tell_when_idle = router, run, tell_when_idle
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._held_bytes = 0
        self._counts: dict[tuple[str, int], ShadowCounts] = {}
        self._idle = threading.Event()
        self._stopping = False
        self._thread: Thread | None = None

    def answered(self, call: InferCall, result: InferResult) -> None:
        """Take in a request that was answered, if the rules want its shadow and there is room."""
        if not call.chosen or self._router.rules(call.model).shadow is None:
            return
        record = result.record
        version = self._router.shadow_of(call.model, call.client_id or record.request_uid)
        if version is None:
            return
        size_bytes = sum(output.nbytes for output in result.outputs.values())
        for tensor in call.tensors.values():
            if isinstance(tensor.data, RegionPart):  # its client may have changed it since
                self._count(call.model, version, skipped=1)
                return
            size_bytes += memoryview(tensor.data).nbytes
        with self._changed:
            full = len(self._waiting) >= _MOST_WAITING or not self._started()
            full = full or self._held_bytes + size_bytes > _MOST_BYTES or self._stopping
            if not full:
                self._held_bytes += size_bytes
        if full:
            self._count(call.model, version, skipped=1)
            return
        tensors = {name: replace(each, data=b"".join(each.pieces())) for name, each in
                   call.tensors.items()}  # fmt: skip
        again = replace(
            call, version=str(version), chosen="", client_id="", tensors=tensors, seed=record.seed,
            output_place=None, timeout_ns=None, qos_target_ns=None,
        )  # fmt: skip
        until_ns = clock.now_ns() + int(_KEPT_S * 1e9)
        with self._changed:
            self._waiting.append(
                _Waiting(again, result.outputs, record.graph_version, size_bytes, until_ns)
            )
            self._changed.notify_all()

    def _started(self) -> bool:
        """Return True once the thread runs; a system without threads is asked again."""
        if self._thread is None and not self._stopping:
            thread = Thread(target=self._work, name="shadows")
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("no thread runs shadows: %s", error)
                return False
            self._thread = thread
        return True

    def counts(self, model: str, version: int) -> ShadowCounts:
        """Return how the shadows of a version compared, since the server started."""
        return self._counts.get((model, version), ShadowCounts())

    def all_counts(self) -> dict[tuple[str, int], ShadowCounts]:
        """Return the same by model and version."""
        return dict(self._counts)

    def begin_stop(self) -> None:
        """Begin no more; the one that runs ends with the engine's other requests. Idempotent."""
        with self._changed:
            self._stopping = True
            self._waiting.clear()
            self._changed.notify_all()
        self._idle.set()

    def stop(self) -> None:
        """Return once none runs, when the engine's requests have ended."""
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                item = self._waiting.popleft()
            try:
                self._shadow(item)
            except Exception:  # a bug, which must cost no request
                _log.exception("a shadow of model %s failed", item.call.model)
                self._count(item.call.model, int(item.call.version), failed=1)
            finally:
                self._tell_when_idle(None)
                with self._changed:
                    self._held_bytes -= item.size_bytes

    def _shadow(self, item: _Waiting) -> None:
        """Run one until it has ended, or is not to be tried again."""
        model, version = item.call.model, int(item.call.version)
        self._tell_when_idle(self._idle.set)
        for _ in range(_ATTEMPTS):
            if self._stopping or self._router.rules(model).shadow != version:
                break
            self._idle.clear()
            try:
                result = self._run(item.call)
            except (QueueFull, RequestCancelled):
                left_s = (item.until_ns - clock.now_ns()) / 1e9
                if left_s <= 0 or not self._idle.wait(left_s):
                    break
                continue
            except ServeError as error:
                _log.info("the shadow of model %s:%d failed: %s", model, version, error)
                self._count(model, version, failed=1)
                return
            if result.record.graph_version != item.graph_version:
                break
            largest = _difference(item.outputs, result.outputs)
            self._compared(model, version, *largest)
            return
        self._count(model, version, skipped=1)

    def _compared(self, model: str, version: int, absolute: float, relative: float) -> None:
        with self._changed:
            before = self.counts(model, version)
            self._counts[model, version] = before._replace(
                compared=before.compared + 1,
                different=before.different + (not relative <= TOLERANCE),
                most_absolute=max(before.most_absolute, absolute),
                most_relative=max(before.most_relative, relative),
            )

    def _count(self, model: str, version: int, *, failed: int = 0, skipped: int = 0) -> None:
        with self._changed:
            before = self.counts(model, version)
            self._counts[model, version] = before._replace(
                failed=before.failed + failed, skipped=before.skipped + skipped
            )


def _difference(main: _Outputs, shadow: _Outputs) -> tuple[float, float]:
    """Return the largest difference of an element, and its share of the greatest element.

    Infinite where names, shapes or the places of NaN and infinity differ.
    """
    absolute = relative = 0.0
    if main.keys() != shadow.keys():
        return np.inf, np.inf
    for name, one in main.items():
        other = shadow[name]
        if one.shape != other.shape:
            return np.inf, np.inf
        if not one.size:
            continue
        left, right = one.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(left)
        if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
            return np.inf, np.inf
        left, right = left[finite], right[finite]
        if not np.isfinite(right).all():
            return np.inf, np.inf
        if not left.size:
            continue
        off, greatest = float(np.abs(left - right).max()), float(np.abs(left).max())
        absolute = max(absolute, off)
        relative = max(relative, off / greatest if greatest else (np.inf if off else 0.0))
    return absolute, relative
