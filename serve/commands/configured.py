"""Parts of a server that its configuration determines: the device and the calibration cache."""

import logging

from serve.config import Config
from serve.core.disciplines import get_discipline
from serve.models.cache import CalibrationCache
from serve.models.model_signature import PACKAGED
from serve.server.device import Device, find_device
from serve.server.lanes.processes import allocator_facts

_log = logging.getLogger(__name__)


def device_of(config: Config) -> Device:
    """Find the configured device, with spare lanes if the discipline suspends tasks.

    Raises ConfigError when this machine does not have it.
    """
    suspends = get_discipline(config.scheduling.discipline).suspends
    return find_device(config.device, spare_lanes=suspends)


def calibration_cache(config: Config, device: Device) -> CalibrationCache:
    """Open the cache that holds this configuration's calibrations."""
    folder, budget_s = config.cache_path(), config.models.calibration_s
    limit_bytes = config.models.cache_limit_bytes
    if device.places:
        return CalibrationCache(
            folder, budget_s=budget_s, device=device.name, limit_bytes=limit_bytes
        )
    executor = config.models.executor
    return CalibrationCache(
        folder,
        executor=executor,
        compiles=executor in PACKAGED or (executor == "auto" and config.models.compile),
        budget_s=budget_s,
        allocator=allocator_facts(device.keep_bytes),
        limit_bytes=limit_bytes,
    )
