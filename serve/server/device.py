"""The device that lanes run on: its memory, its cores, and the memory that is set aside."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from serve.config_device import DeviceConfig
from serve.core.params import LANES_PER_CORE
from serve.errors import ConfigError
from serve.ipc.setup import DevicePlace
from serve.server.cgroup import Limits, find_limits
from serve.server.gpus import Gpu, NoCuda, find_gpus

_log = logging.getLogger(__name__)

#: Share of the memory free at start that is left to the operating system and the server.
_RESERVE_SHARE = 0.25
#: Freed memory that lanes keep from run to run: all lanes as a share of the device, and one lane.
_KEPT_SHARE = 1 / 8
_MOST_KEPT_BYTES = 256 << 20
#: Memory that lanes may hold between runs beyond models and kept memory: a share of the budget for
#: all lanes, and a least value for each.
_HELD_SHARE, _LEAST_HELD_BYTES = 1 / 4, 128 << 20
#: Lanes of a GPU, by default and at most: torch has 32 streams of a priority, and lanes that share
#: a stream with copies or with the hot set would wait for each other.
_GPU_LANES, _MOST_GPU_LANES = 4, 28
#: Part of a GPU's free memory that is left to the contexts of two processes and to CUDA.
_GPU_RESERVE_BYTES, _GPU_RESERVE_SHARE = 1 << 30, 1 / 32
#: The calibrator's memory: a share of a GPU, and an upper bound.
_CALIBRATION_SHARE, _CALIBRATION_BYTES = 1 / 8, 8 << 30
#: Static memory of a lane's stream, of which it has two, and three where multiprocessors are
#: reserved: cuBLAS keeps 32 MiB on each and cublasLt 1.
_STREAM_STATIC_BYTES = 36 << 20
#: Memory for captured runs: a share of a GPU, and an upper bound per lane. Small graphs gain.
_REPLAY_SHARE, _REPLAY_BYTES = 1 / 32, 256 << 20
#: Memory for warm-up runs, on one lane at a time: a share of a GPU, and an upper bound.
_WARM_UP_SHARE, _WARM_UP_BYTES = 1 / 64, 256 << 20
#: Share lost to fragmentation, so that everything the ledger admits can be placed.
_PIECES_SHARE = 1 / 64


@dataclass(frozen=True, slots=True)
class Device:
    """The device that lanes run on, or several equal ones: numbers are those of each."""

    #: `cpu` or `cuda`, and the model of processor or GPU.
    name: str
    #: Memory for weights and running tasks together.
    budget_bytes: int
    #: The cores that each lane may be pinned to; empty when the kernel chooses.
    lane_cores: tuple[tuple[int, ...], ...]
    #: Number of tasks that execute at once without sharing a core.
    parallelism: int
    #: True when a running task can be suspended anywhere and resumed.
    can_suspend: bool
    #: Freed memory that a lane may keep from run to run, which saves page faults; not part of
    #: `budget_bytes`.
    keep_bytes: int = 0
    #: Memory that a lane's process may hold between runs beyond its models before it is recycled.
    lane_limit_bytes: int | None = None
    #: Requests after which a lane's process is recycled.
    lane_requests: int | None = None
    #: Places of the devices whose lanes are threads; empty when each lane is a process.
    places: tuple[DevicePlace, ...] = ()

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.places) or 1

    @property
    def gathers(self) -> bool:
        """True when lanes gather features of resident graphs themselves."""
        return any(place.has_kernels for place in self.places)

    @property
    def title(self) -> str:
        """Name and number of devices, for people."""
        return self.name if self.count == 1 else f"{self.name} × {self.count}"

    @property
    def names(self) -> tuple[str, ...]:
        """A distinct name for each device."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name} #{number}" for number in range(self.count))


def find_device(
    config: DeviceConfig,
    *,
    spare_lanes: bool,
    root: Path = Path("/"),
    gpus: tuple[Gpu, ...] | None = None,
) -> Device:
    """Find the configured device; raises ConfigError when this machine does not have it.

    `/proc` and the control groups are read below `root`. With `spare_lanes`, a core gets
    `LANES_PER_CORE` lanes unless their number is configured: a suspended task keeps its lane.
    `gpus` are the machine's GPUs if they were detected before.
    """
    if config.kind != "cpu":
        try:
            return _gpu_device(config, gpus or find_gpus())
        except NoCuda as error:
            if config.kind == "cuda":
                raise ConfigError(f"device.kind: 'cuda': {error}") from error
            _log.log(error.level, "no CUDA (%s): serving on the processor", error)
    limits = find_limits(root)
    cores = sorted(os.sched_getaffinity(0))
    at_once = _cores_at_once(len(cores), limits)
    lanes = config.lanes or at_once * (LANES_PER_CORE if spare_lanes else 1)
    free_bytes = _free_bytes(root, limits)
    total_bytes = config.memory_budget_bytes or int(free_bytes * (1 - _RESERVE_SHARE))
    keep_bytes = min(_MOST_KEPT_BYTES, int(total_bytes * _KEPT_SHARE) // lanes)
    lane_cores: tuple[tuple[int, ...], ...] = ((),) * lanes
    if at_once == len(cores):
        lane_cores = tuple((cores[index % len(cores)],) for index in range(lanes))
    held_bytes = max(_LEAST_HELD_BYTES, int(total_bytes * _HELD_SHARE) // lanes)
    return Device(
        name=f"cpu: {_processor_name()}",
        budget_bytes=total_bytes - lanes * keep_bytes,
        lane_cores=lane_cores,
        parallelism=min(lanes, at_once),
        can_suspend=True,
        keep_bytes=keep_bytes,
        lane_limit_bytes=config.max_lane_memory_bytes or keep_bytes + held_bytes,
        lane_requests=config.max_lane_requests,
    )


def _cores_at_once(cores: int, limits: Limits) -> int:
    """Return how many lanes may execute at once: beyond the CPU quota, the kernel stops all.

    With a quota below the number of cores lanes are not pinned: other containers with a quota would
    pin their processes to the same cores.
    """
    if limits.cores is None or limits.cores >= cores:
        return cores
    at_once = max(1, int(limits.cores))
    _log.info(
        "the CPU quota is %g of %d cores: %d at once, lanes are pinned to none",
        limits.cores, cores, at_once,
    )  # fmt: skip
    return at_once


def _gpu_device(config: DeviceConfig, found: tuple[Gpu, ...]) -> Device:
    """Return the device of these GPUs.

    Raises NoCuda when their free memory is too small for lanes, and ConfigError when the
    configuration makes it so, or names GPUs that there are not.
    """
    gpus = _chosen(config, found)
    name = gpus[0].name
    lanes = config.lanes or _GPU_LANES
    if lanes > _MOST_GPU_LANES:
        raise ConfigError(f"device.lanes: a GPU has at most {_MOST_GPU_LANES}, got {lanes}")
    # Devices get equal work, so each has the free memory of the fullest.
    least_bytes = min(gpu.free_bytes for gpu in gpus)
    free_bytes = int(least_bytes * (1 - _GPU_RESERVE_SHARE)) - _GPU_RESERVE_BYTES
    total_bytes = min(config.memory_budget_bytes or free_bytes, free_bytes)
    calibration_bytes = min(_CALIBRATION_BYTES, int(total_bytes * _CALIBRATION_SHARE))
    slab_bytes = total_bytes - calibration_bytes
    replay_bytes = 0
    if config.cuda_graphs == "auto":
        replay_bytes = min(_REPLAY_BYTES, int(total_bytes * _REPLAY_SHARE) // lanes)
    warm_up_bytes = min(_WARM_UP_BYTES, int(total_bytes * _WARM_UP_SHARE))
    static_bytes = lanes * (3 if config.reserved_sms else 2) * _STREAM_STATIC_BYTES
    has_kernels = all(gpu.has_kernels for gpu in gpus)
    own_bytes = static_bytes + lanes * replay_bytes + warm_up_bytes
    budget_bytes = int(slab_bytes * (1 - _PIECES_SHARE)) - own_bytes
    if budget_bytes <= 0:
        told = (
            f"{name} has {least_bytes} bytes free, of which {max(0, total_bytes)} may be used; "
            f"{lanes} lanes need more for themselves (device.memory_budget, device.lanes)"
        )
        if config.memory_budget_bytes is None and config.lanes is None:
            raise NoCuda(told)  # nobody has chosen the GPU
        raise ConfigError(f"device: {told}")
    places = tuple(
        DevicePlace(
            f"cuda:{gpu.index}",
            slab_bytes=slab_bytes,
            calibration_bytes=calibration_bytes,
            replay_bytes=replay_bytes,
            warm_up_bytes=warm_up_bytes,
            static_bytes=static_bytes,
            has_kernels=has_kernels,
            reserved_sms=config.reserved_sms,
        )
        for gpu in gpus
    )
    where = ", ".join(place.name for place in places)
    _log.info(
        "serving on %s (%s) with %d lanes, %d MiB each", name, where, lanes, budget_bytes >> 20
    )
    return Device(
        # What is calibrated with kernels does not hold without them.
        name=f"cuda: {name}" + ("" if has_kernels else ", without kernels"),
        budget_bytes=budget_bytes,
        lane_cores=((),) * lanes,
        parallelism=lanes,
        can_suspend=False,
        places=places,
    )


def _chosen(config: DeviceConfig, found: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Choose GPUs of one model, as a calibration made on one must hold for all."""
    if config.gpus is None:
        others = [f"{gpu.index} ({gpu.name})" for gpu in found if gpu.name != found[0].name]
        if others:
            _log.warning(
                "serving on GPUs of the first one's model, %s, and not on %s (device.gpus)",
                found[0].name,
                ", ".join(others),
            )
        return tuple(gpu for gpu in found if gpu.name == found[0].name)
    by_index = {gpu.index: gpu for gpu in found}
    if missing := [index for index in config.gpus if index not in by_index]:
        raise ConfigError(f"device.gpus: there is no GPU {missing}, only {sorted(by_index)}")
    if len(set(config.gpus)) < len(config.gpus):
        raise ConfigError(f"device.gpus: no GPU may be named twice, got {list(config.gpus)}")
    chosen = tuple(by_index[index] for index in config.gpus)
    if len({gpu.name for gpu in chosen}) > 1:
        told = ", ".join(f"{gpu.index} is {gpu.name}" for gpu in chosen)
        raise ConfigError(f"device.gpus: all must be of one model, but {told}")
    return chosen


def _free_bytes(root: Path, limits: Limits) -> int:
    """Return available memory within the limits of this process's control groups."""
    lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    free_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    return free_bytes if limits.memory_bytes is None else min(free_bytes, limits.memory_bytes)


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine
