"""What a lane's process is told at its start; plain data, so that no torch is needed to hold it."""

from dataclasses import dataclass, replace
from typing import Protocol

#: Part of the calibrator's memory for captured runs: one in so many.
_CAPTURES_OF_CALIBRATION = 16


class PassedFile(Protocol):
    """An open file on its way into another process."""

    def detach(self) -> int:
        """The file descriptor, now owned by the caller."""
        ...


@dataclass(frozen=True)
class DevicePlace:
    """Where the lanes of one process run, when they are threads on a device they share."""

    #: As torch names it: `cuda:0`; `cpu` for tests of everything but the device.
    name: str
    #: Device memory for weights, workspaces and the tasks of all its lanes; 0: not managed.
    slab_bytes: int = 0
    #: The same for the process that calibrates beside them.
    calibration_bytes: int = 0
    #: Of the slab, for the captured runs of each lane; 0: none are captured.
    replay_bytes: int = 0
    #: Of the slab, for the runs that warm a model up, on one lane at a time.
    warm_up_bytes: int = 0
    #: Of the slab, for what libraries keep, all lanes together.
    static_bytes: int = 0
    #: Requests are staged for it, so the shared memory that they lie in is pinned.
    stages: bool = True

    @property
    def on_processor(self) -> bool:
        """The processor stands in for a device."""
        return self.name == "cpu"

    def for_calibration(self) -> "DevicePlace":
        """The place of the process that calibrates; it tries captures for lanes without them too.

        What it finds is kept, also for a server that captures.
        """
        replay_bytes = max(self.replay_bytes, self.calibration_bytes // _CAPTURES_OF_CALIBRATION)
        return replace(
            self, slab_bytes=self.calibration_bytes, replay_bytes=replay_bytes, stages=False
        )


@dataclass(frozen=True)
class LaneSetup:
    """What a lane is told at its start."""

    #: For the log: `lane 0`, `calibrator`.
    name: str
    #: Cores to be pinned to; empty: left to the kernel.
    cores: tuple[int, ...]
    threads: int
    pool_capacity_bytes: int
    #: Where its words lie in the pool's file.
    words_offset_bytes: int
    log_level: int
    #: Freed memory to keep from run to run.
    keep_bytes: int
    #: Niceness of the process. Positive for lanes that compute: the server's threads go first.
    niceness: int = 0
    #: None: one lane, in a process of its own.
    place: DevicePlace | None = None
