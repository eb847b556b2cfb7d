"""The systems of the GNNSched paper's evaluation, as they are described there.

Default runs one task at a time. MPS-Base runs up to four and MPS-Aggr whatever there is, both first
come, first served, with memory unchecked: while more is reserved than the device has, its pages go
to and fro and all are slower. GNNSched, under either of its policies, makes groups of the tasks
that arrived at one time, one after the other, each within its memory threshold gTH (Algorithms 1
and 2).
"""

from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.types import Bytes, LaneId, Nanos
from serve.errors import ConfigError
from serve.sim.device import DeviceModel
from serve.sim.workload import BASELINES, System

GNNSCHED = ("sqtf", "bqt")
#: The paper bounds a group by memory only; more than these never come together there.
_LANES = 64
#: Arrivals at equal times are one window, and others are not.
_WINDOW_NS = Nanos(1)


def shared_by(parallelism: float, most: int = _LANES) -> tuple[float, ...]:
    """Return the slowdown of 1, 2, … tasks on a device that keeps `parallelism` of them busy."""
    return tuple(max(1.0, count / parallelism) for count in range(1, most + 1))


def paper_system(name: str, budget_bytes: int, model: DeviceModel) -> System:
    """Return a system of the paper on a device with `budget_bytes` of memory.

    Raises ConfigError for an unknown name.
    """
    if name in BASELINES:
        unchecked = DeviceFacts(Bytes(1 << 62), _lanes(BASELINES[name] or _LANES))
        return System(SchedulerParams(unchecked, policy="fifo", discipline="rolling"), model)
    if name not in GNNSCHED:
        raise ConfigError(f"system '{name}' is not one of {', '.join((*BASELINES, *GNNSCHED))}")
    params = SchedulerParams(
        DeviceFacts(Bytes(budget_bytes), _lanes(_LANES)),
        policy=name,
        discipline="barrier",
        window="fixed",
        window_ns=_WINDOW_NS,
        prepare_ahead=_LANES,
        horizon=2 * _LANES,
    )
    return System(params, model)


def _lanes(count: int) -> tuple[LaneId, ...]:
    return tuple(LaneId(lane) for lane in range(count))
