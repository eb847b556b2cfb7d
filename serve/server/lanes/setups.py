"""The settings that a pool's processes start with."""

import logging
from collections.abc import Callable
from dataclasses import replace

from serve.ipc.setup import Confinement, LaneSetup
from serve.ipc.shared_pool import SharedPool
from serve.niceness import IDLE_CLASS
from serve.server.lanes.lane_handle import LaneProcess


class LaneSetups:
    """Makes the settings of a pool's processes when they start."""

    def __init__(
        self,
        shared: SharedPool,
        keep_bytes: int,
        threads: int,
        niceness: int,
        confinement: Callable[[str], Confinement] | None,
    ) -> None:
        """See ``LanePool``; `confinement` is None where lanes may do whatever the server may."""
        self._shared = shared
        self._keep_bytes, self._threads, self._niceness = keep_bytes, threads, niceness
        self._confinement = confinement

    def of(self, process: LaneProcess, words: int) -> LaneSetup:
        """Return the setup of a process whose first lane has the words of that number."""
        rules = self._confinement
        return LaneSetup(
            name=process.name,
            cores=process.lanes[0].cores,
            threads=self._threads,
            pool_capacity_bytes=self._shared.capacity_bytes,
            words_offset_bytes=self._shared.words_offset_bytes(words),
            log_level=logging.getLogger().getEffectiveLevel(),
            keep_bytes=self._keep_bytes,
            niceness=self._niceness,
            place=process.place,
            confinement=rules and rules(process.domain),
        )

    def of_trainer(self, process: LaneProcess, domain: str, folder: str) -> LaneSetup:
        """Return the setup of a process that trains a model and writes to the folder."""
        rules = self._confinement
        return replace(
            self.of(process, 0),
            name="training",
            cores=(),
            niceness=IDLE_CLASS,
            confinement=rules and rules(domain).for_training(folder),
        )

    def of_calibrator(
        self,
        process: LaneProcess,
        words: int,
        domain: str,
        most_niceness: int,
        writable: tuple[str, ...],
    ) -> LaneSetup:
        """Return the setup of a process that measures models as if on lanes of `process`."""
        place, rules = process.place, self._confinement
        return replace(
            self.of(process, words),
            name="calibrator",
            place=None if place is None else place.for_calibration(),
            niceness=min(self._niceness, most_niceness),
            confinement=rules and rules(domain).for_calibration(writable),
        )
