"""Requests that the server sends side by side at start, to learn how much runs slow one another.

They are served like all requests, so they meet the interference that requests will meet: other
kernels on a GPU, the memory bus on cores, and the server's own work beside both. From then on every
run teaches in the same way (``serve.estimate.slowdown``).
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from serve.core.types import Nanos
from serve.errors import ServeError
from serve.server import clock
from serve.server.api import InferCall, Ticket
from serve.server.catalogue import ModelEntry
from serve.server.learning.alone import (
    PROBE_EDGES_PER_NODE,
    PROBE_NODES,
    probe_call,
    probe_counts,
)

_log = logging.getLogger(__name__)

#: Numbers of runs at once on a device; the slowdowns between them are interpolated.
_SIDE_BY_SIDE = (2, 3, 4, 6, 8, 12, 16, 24, 32)
#: Repetitions for each number.
_ROUNDS = 4
#: Upper bound of a run: longer ones teach no more.
_LONGEST_NS = 20_000_000
#: QoS target of these requests: so late that none waits for another's sake.
_TARGET_NS = Nanos(3_600_000_000_000)
#: Relative change of a slowdown that the scheduler is told of.
_NEWS = 0.03


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """Room for runs side by side."""

    #: Tasks that a device runs at once.
    slots: int
    #: Memory for tasks on a device.
    budget_bytes: int
    #: Number of equal devices.
    devices: int = 1


def learn_interference(
    entries: Sequence[ModelEntry],
    submit: Callable[[InferCall], Ticket],
    room: DeviceRoom,
) -> None:
    """Send the models' requests several at a time; their runs are learned from as they end.

    Each number that a device has slots for is tried, with the largest probes that fit its budget
    together and do not run long. Several devices get as many each.
    """

    def ask(call: InferCall) -> None:
        try:
            submit(msgspec.structs.replace(call, arrived_ns=clock.now_ns())).result()
        except ServeError as error:
            _log.warning("model %s beside others: %s", call.model, error)

    for count in (number for number in _SIDE_BY_SIDE if number <= room.slots):
        calls = [call for entry in entries if (call := _largest(entry, room.budget_bytes // count))]
        if not calls:
            return
        at_once = count * room.devices
        with ThreadPoolExecutor(at_once) as threads:
            for turn in range(_ROUNDS):
                chosen = [calls[(turn + number) % len(calls)] for number in range(at_once)]
                list(threads.map(ask, chosen))


def is_news(learned: Sequence[float], known: Sequence[float]) -> bool:
    """Return True when learned slowdowns differ enough from the known ones to be told."""
    if len(learned) != len(known):
        return True
    return any(abs(new / old - 1) > _NEWS for new, old in zip(learned, known, strict=True))


def _largest(entry: ModelEntry, limit_bytes: int) -> InferCall | None:
    """Return the largest short request that fits `limit_bytes`; None when none fits."""
    chosen = None
    for num_nodes in PROBE_NODES:
        size = num_nodes, PROBE_EDGES_PER_NODE * num_nodes
        estimate = entry.estimator.estimate(*probe_counts(entry, *size))
        if estimate.reserve_bytes <= limit_bytes and (
            chosen is None or estimate.run_ns <= _LONGEST_NS
        ):
            chosen = size
    if chosen is None:
        return None
    return msgspec.structs.replace(probe_call(entry, *chosen), qos_target_ns=_TARGET_NS)
