"""What this machine offers to lanes. Facts only: the scheduler gets numbers, not devices."""

import os
from dataclasses import dataclass
from pathlib import Path

from serve.config import DeviceConfig
from serve.core.params import LANES_PER_CORE
from serve.errors import ConfigError

#: Of what is free at start, kept for the operating system, the server and its buffers.
_RESERVE_SHARE = 0.25
#: What all lanes together may keep, as a share of the device, and what one may keep at most.
_KEPT_SHARE = 1 / 16
_MOST_KEPT_BYTES = 256 << 20
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class Device:
    """The device lanes run on."""

    #: `cpu`, and the model of the processor where the system tells it.
    name: str
    #: Memory for weights and running tasks together.
    budget_bytes: int
    #: For each lane, the cores it is pinned to.
    lane_cores: tuple[tuple[int, ...], ...]
    #: Tasks that execute at once without sharing a core.
    parallelism: int
    #: A running task can be stopped anywhere and resumed.
    can_suspend: bool
    #: Freed memory a lane may keep from run to run, so that its pages need not be asked for
    #: again; not part of `budget_bytes`.
    keep_bytes: int = 0


def find_device(config: DeviceConfig, *, spare_lanes: bool) -> Device:
    """The device of the configuration; raises ConfigError when this machine has none such.

    With `spare_lanes` there are `LANES_PER_CORE` unless the configuration says how many: a
    suspended task keeps its lane.
    """
    if config.kind == "cuda":
        raise ConfigError("device.kind: 'cuda': this version runs on 'cpu' only")
    cores = sorted(os.sched_getaffinity(0))
    lanes = config.lanes or len(cores) * (LANES_PER_CORE if spare_lanes else 1)
    total_bytes = config.memory_budget_bytes or int(_free_bytes() * (1 - _RESERVE_SHARE))
    keep_bytes = min(_MOST_KEPT_BYTES, int(total_bytes * _KEPT_SHARE) // lanes)
    return Device(
        name=f"cpu: {_processor_name()}",
        budget_bytes=total_bytes - lanes * keep_bytes,
        lane_cores=tuple((cores[index % len(cores)],) for index in range(lanes)),
        parallelism=min(lanes, len(cores)),
        can_suspend=True,
        keep_bytes=keep_bytes,
    )


def _free_bytes() -> int:
    """Memory this process may still take: what is available, within the container's limit."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines()
    )
    free_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    for path in _CGROUP_LIMITS:
        if path.exists() and (text := path.read_text("ascii").strip()).isdigit():
            free_bytes = min(free_bytes, int(text))
    return free_bytes


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine
