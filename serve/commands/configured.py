"""Parts of a server that its configuration determines: the device and the calibration cache."""

import logging

from serve.access.certificates import CertificateFiles
from serve.access.settings import AccessSettings
from serve.access.tokens import TenantLimits
from serve.config import Config
from serve.core.disciplines import get_discipline
from serve.core.types import TenantRules
from serve.models.cache import CalibrationCache, require_own
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
    """Open the cache that holds this configuration's calibrations.

    Raises ConfigError when others own it or may write to it.
    """
    folder, budget_s = config.cache_path(), config.models.calibration_s
    require_own(folder)
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


def access_settings(config: Config) -> AccessSettings:
    """Return what the configuration says of access."""
    auth, server = config.auth, config.server
    file = None if auth.tokens_file is None else str(config.path(auth.tokens_file))
    return AccessSettings(
        tokens_file=file,
        open_to_all=server.on_loopback,
        certificates=server.tls.client_ca is not None,
        admin_on_port=auth.admin_on_port,
    )


def certificate_files(config: Config) -> CertificateFiles | None:
    """Return the certificate and key that the configuration names; None without."""
    tls = config.server.tls
    if tls.certificate is None or tls.key is None:
        return None
    client_ca = None if tls.client_ca is None else str(config.path(tls.client_ca))
    return CertificateFiles(str(config.path(tls.certificate)), str(config.path(tls.key)), client_ca)


def tenant_rules(limits: TenantLimits) -> TenantRules:
    """Return what the scheduler must know of a tenant."""
    return TenantRules(limits.name, limits.weight, limits.max_in_queue, limits.requests_per_s)
