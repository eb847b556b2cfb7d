"""The setup of a lane process: plain data, so that the main process needs no torch for it."""

from dataclasses import dataclass, replace
from typing import Protocol

#: The calibrator gets 1/16 of its memory for captured runs.
_CAPTURES_OF_CALIBRATION = 16
#: The calibrator may take the memory of so many lanes.
_LANES_OF_CALIBRATION = 4


class PassedFile(Protocol):
    """A file descriptor on its way into another process."""

    def detach(self) -> int:
        """Return the file descriptor, which the caller then owns."""
        ...


@dataclass(frozen=True)
class DevicePlace:
    """The device that the lanes of one process share as threads, and its memory."""

    #: torch's name of the device: `cuda:0`; `cpu` in tests of everything but the device.
    name: str
    #: Device memory for weights, workspaces and the tasks of all its lanes; 0 for unmanaged.
    slab_bytes: int = 0
    #: Device memory for the process that calibrates beside them.
    calibration_bytes: int = 0
    #: Part of the slab for the captured runs of each lane; 0 to capture none.
    replay_bytes: int = 0
    #: Part of the slab for warm-up runs, on one lane at a time.
    warm_up_bytes: int = 0
    #: Part of the slab that libraries keep, for all lanes together.
    static_bytes: int = 0
    #: False where libgnnserve_cuda was not built or has no code for the device.
    has_kernels: bool = True
    #: Multiprocessors that bounded runs stay off, at least.
    reserved_sms: int = 0
    #: True when requests are staged for it, so that the shared memory is pinned.
    stages: bool = True

    @property
    def on_processor(self) -> bool:
        """True when the processor stands in for a device."""
        return self.name == "cpu"

    def for_calibration(self) -> "DevicePlace":
        """Return the place of the calibrating process, which tries captures even if lanes do not.

        What it finds is kept, also for a server that captures.
        """
        replay_bytes = max(self.replay_bytes, self.calibration_bytes // _CAPTURES_OF_CALIBRATION)
        return replace(
            self,
            slab_bytes=self.calibration_bytes,
            replay_bytes=replay_bytes,
            reserved_sms=0,
            stages=False,
        )


@dataclass(frozen=True)
class FileRules:
    """Which files models may use: they read all but the hidden ones, as the server's user may."""

    hidden: tuple[str, ...]
    #: Files and folders that they may write to, besides their own temporary folder.
    writable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Confinement:
    """What a lane process may do and take."""

    #: The main process, which lanes may not signal.
    server_pid: int
    #: Whether models may use the network.
    network: bool
    #: Whether models may start processes; threads they always may.
    processes: bool
    #: Private memory beyond what a lane has when it starts; None for no limit.
    memory_bytes: int | None
    #: None for all files of the server's user.
    files: FileRules | None = None
    #: Largest file that it may write; None for any size.
    file_bytes: int | None = None

    def for_calibration(self, writable: tuple[str, ...] = ()) -> "Confinement":
        """Return what the calibrating process may take, which writes to `writable` folders, too.

        Those are a compiler's, which starts processes.

        A model that keeps memory of every run costs a lane a restart now and then. Calibration runs
        it many times in one process, and must not refuse it for that.
        """
        files, memory_bytes = self.files, self.memory_bytes
        if files is not None:
            files = replace(files, writable=(*files.writable, *writable))
        if memory_bytes is not None:
            memory_bytes *= _LANES_OF_CALIBRATION
        processes, file_bytes = self.processes or bool(writable), self.file_bytes
        return replace(
            self,
            processes=processes,
            files=files,
            memory_bytes=memory_bytes,
            file_bytes=None if writable else file_bytes,
        )

    def for_training(self, folder: str) -> "Confinement":
        """Return what a training process may take, which writes checkpoints to the folder."""
        files, memory_bytes = self.files, self.memory_bytes
        if files is not None:
            files = replace(files, writable=(*files.writable, folder))
        if memory_bytes is not None:
            memory_bytes *= _LANES_OF_CALIBRATION
        return replace(self, files=files, memory_bytes=memory_bytes, file_bytes=None)


@dataclass(frozen=True)
class LaneSetup:
    """The settings of a lane process."""

    #: Name in the log: `lane 0`, `calibrator`.
    name: str
    #: Cores to be pinned to; empty when the kernel chooses.
    cores: tuple[int, ...]
    threads: int
    pool_capacity_bytes: int
    #: Offset of its first lane's words in the pool's file.
    words_offset_bytes: int
    log_level: int
    #: Freed memory to keep from run to run.
    keep_bytes: int
    #: Niceness of the process, or ``niceness.IDLE_CLASS``. Positive for lanes that compute: the
    #: server's threads go first.
    niceness: int = 0
    #: None for one lane in a process of its own.
    place: DevicePlace | None = None
    #: None for a process that may do whatever the server may.
    confinement: Confinement | None = None
