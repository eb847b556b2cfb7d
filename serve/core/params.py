"""Parameters of a scheduler: policy, discipline, window and the facts of its devices."""

from dataclasses import dataclass
from typing import Literal

from serve.core.jobs.types import NO_JOBS, JobRules
from serve.core.slowdown import NO_SLOWDOWN, check_slowdown
from serve.core.types import ZERO_NS, Bytes, LaneId, Nanos, UnionEstimate

DEFAULT_WINDOW_NS = Nanos(10_000_000)

#: Where tasks can be suspended, a device has more lanes than it executes tasks at once: a suspended
#: task keeps its lane. So many keep nearly all the targets that can be kept
#: (bench/scheduling/policies.py).
LANES_PER_CORE = 4


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device as the scheduler sees it: data, never a branch on its kind."""

    #: Memory for tasks, weights already subtracted; may change by ``BudgetChanged``.
    budget_bytes: Bytes
    #: Its lanes, apart from those of trust domains, which come and go (``own_lanes``). Each starts
    #: as not up, until its ``LaneReady``.
    lane_ids: tuple[LaneId, ...]
    #: Tasks that may execute at once (cores); None: one per lane.
    parallelism: int | None = None
    #: Whether a running task can be suspended and resumed.
    can_suspend: bool = False
    #: What a launch costs besides its run, which merging saves: the word to the lane and back.
    launch_ns: Nanos = ZERO_NS
    #: How much longer a run takes beside 0, 1, 2, … others that execute; the last counts for more.
    #: May change by ``SlowdownChanged``. (1.0,): none disturbs another.
    slowdown: tuple[float, ...] = NO_SLOWDOWN
    #: What a lane may hold between runs beyond what it needs to serve; None: anything.
    lane_limit_bytes: Bytes | None = None
    #: Requests that the process of a lane runs before it is started anew; None: any number.
    lane_requests: int | None = None
    #: Whether long runs can be kept off a part of it, see ``rules.reserved``.
    has_reserved_part: bool = False

    def __post_init__(self) -> None:
        check_slowdown(self.slowdown)
        if self.budget_bytes < 0:
            raise ValueError(f"budget {self.budget_bytes} bytes must be at least 0")
        if not self.lane_ids or len(set(self.lane_ids)) != len(self.lane_ids):
            raise ValueError(f"at least one lane and no id twice, got {self.lane_ids}")
        for name in ("parallelism", "lane_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} must be at least 1")

    @property
    def slots(self) -> int:
        """Tasks that may execute at once when every lane is up."""
        lanes = len(self.lane_ids)
        return lanes if self.parallelism is None else min(lanes, self.parallelism)


@dataclass(frozen=True, slots=True)
class SchedulerParams:
    """Everything the scheduler does not learn from events."""

    device: DeviceFacts
    #: Those beside it, see ``fleet``. What else is set here holds for each of them, `max_queue` for
    #: all together.
    more_devices: tuple[DeviceFacts, ...] = ()
    policy: str = "sqtf"
    discipline: str = "rolling"
    window: Literal["adaptive", "fixed"] = "adaptive"
    #: Length of a fixed window.
    window_ns: Nanos = DEFAULT_WINDOW_NS
    #: Accepted tasks without an answer; more are refused.
    max_queue: int = 512
    #: Tasks kept prepared beyond those that could run now; None: one per slot, so that the next
    #: group is prepared while the current one runs, or four where prepared tasks may be merged.
    prepare_ahead: int | None = None
    #: Tasks planned at a time, see docs/adr/0002-planning-horizon.md; None: eight per slot,
    #: at least 16 and at most 64.
    horizon: int | None = None
    #: How often later tasks may take memory that an earlier one waits for.
    bypass_limit: int = 8
    #: After this many launches past the longest waiting task, that one goes first.
    patience: int = 128
    #: While more work comes than the lanes can do, refuse what would be late behind work as urgent.
    shed_late: bool = False
    #: Merge waiting tasks of one model by this, see ``merging``; None: never.
    unions: UnionEstimate | None = None
    #: Tasks in one union, at most.
    most_merged: int = 16
    #: Whether lanes are looked at when their runs take far too long, see ``watch``; and what any
    #: run may take. None: 60 s or 200 times its estimate.
    watched: bool = False
    run_limit_ns: Nanos | None = None
    #: Training jobs beside requests, on a single device.
    jobs: JobRules = NO_JOBS

    def __post_init__(self) -> None:
        lane_ids = [lane_id for device in self.devices for lane_id in device.lane_ids]
        if len(set(lane_ids)) != len(lane_ids):
            raise ValueError(f"no lane is of two devices, got {lane_ids}")
        if self.jobs.workers and self.more_devices:
            raise ValueError("jobs train beside requests on a single device only")
        for name in (
            "window_ns",
            "max_queue",
            "horizon",
            "patience",
            "most_merged",
            "run_limit_ns",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.bypass_limit < 0:
            raise ValueError(f"bypass_limit must be at least 0, got {self.bypass_limit}")
        if self.prepare_ahead is not None and self.prepare_ahead < 0:
            raise ValueError(f"prepare_ahead must be at least 0, got {self.prepare_ahead}")

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """Facts of every device, by DeviceId."""
        return (self.device, *self.more_devices)

    @property
    def planned_at_once(self) -> int:
        """`horizon`, or its default for the device."""
        return self.horizon or min(max(16, 8 * self.device.slots), 64)

    @property
    def prepare_depth(self) -> int:
        """`prepare_ahead`, or its default for the device."""
        if self.prepare_ahead is not None:
            return self.prepare_ahead
        return self.device.slots * (1 if self.unions is None else 4)
