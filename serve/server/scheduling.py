"""The scheduler's parameters, from the configuration and the machine."""

from collections.abc import Sequence

from serve.config import Config
from serve.core.jobs.types import JobRules
from serve.core.params import DeviceFacts, SchedulerParams
from serve.core.types import Bytes, LaneId, Nanos, UnionEstimate
from serve.server.device import Device
from serve.server.lane_run import LAUNCH_NS


def scheduler_params(
    config: Config,
    device: Device,
    lane_ids_by_device: Sequence[tuple[LaneId, ...]],
    union: UnionEstimate,
) -> SchedulerParams:
    """Return the parameters; `union` estimates merged runs, where the configuration merges."""
    chosen = config.scheduling
    limit_bytes = None if device.lane_limit_bytes is None else Bytes(device.lane_limit_bytes)
    first, *more = (
        DeviceFacts(
            budget_bytes=Bytes(device.budget_bytes - config.training.memory_bytes),
            lane_ids=lane_ids,
            parallelism=device.parallelism,
            can_suspend=device.can_suspend,
            launch_ns=LAUNCH_NS,
            lane_limit_bytes=limit_bytes,
            lane_requests=device.lane_requests,
            has_reserved_part=any(place.reserved_sms for place in device.places),
        )
        for lane_ids in lane_ids_by_device
    )
    return SchedulerParams(
        policy=chosen.policy,
        discipline=chosen.discipline,
        window=chosen.window,
        window_ns=Nanos(int(chosen.window_ms * 1e6)),
        device=first,
        more_devices=tuple(more),
        max_queue=config.server.max_queue,
        shed_late=chosen.shed_late,
        unions=union if chosen.merge else None,
        watched=True,
        run_limit_ns=config.server.max_run_ns,
        jobs=JobRules(
            workers=config.training.workers,
            memory_bytes=Bytes(config.training.memory_bytes),
            policy=config.training.policy,
            slack=config.training.slack,
        ),
    )
