"""How a lane's process is entered; light, because the main process imports it to start lanes."""

import socket
from dataclasses import dataclass
from typing import Protocol


class PassedFile(Protocol):
    """An open file on its way into another process."""

    def detach(self) -> int:
        """The file descriptor, now owned by the caller."""
        ...


@dataclass(frozen=True)
class LaneSetup:
    """What a lane is told at its start."""

    #: For the log: `lane 0`, `calibrator`.
    name: str
    #: Cores to be pinned to; empty: left to the kernel.
    cores: tuple[int, ...]
    threads: int
    pool_capacity_bytes: int
    #: Where its word to stop at lies in the pool's file.
    stop_word_offset_bytes: int
    log_level: int
    #: Freed memory to keep from run to run.
    keep_bytes: int


def run_lane(setup: LaneSetup, channel: socket.socket, pool_file: PassedFile) -> None:
    """Entry point of the process; torch is imported here, in the fork server's preload."""
    from serve.runtime import lane

    lane.main(setup, channel, pool_file)
