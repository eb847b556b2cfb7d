"""The processes that work beside the lanes, and the cores that lanes leave them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from serve.core.types import LaneId
from serve.ipc.shared_pool import SharedPool
from serve.server.lanes.calibrators import Calibrator, Calibrators
from serve.server.lanes.lane_handle import LaneHandle, LaneProcess
from serve.server.lanes.setups import LaneSetups


class Trainers:
    """Starts training processes."""

    def __init__(
        self,
        setups: LaneSetups,
        processes: Sequence[LaneProcess],
        lanes: Mapping[LaneId, LaneHandle],
        calibrators: Calibrators,
        shared: SharedPool,
    ) -> None:
        """All are the pool's own; `calibrators` end the processes when the server stops."""
        self._setups, self._processes, self._lanes = setups, processes, lanes
        self._calibrators, self._shared = calibrators, shared
        self._cores = sorted({core for lane in lanes.values() for core in lane.cores})

    def start(self, domain: str, folder: str) -> AbstractContextManager[Calibrator]:
        """Start a process that trains a model of the trust domain and writes to the folder.

        It is in the kernel's idle class, on any core. Raises NotReady while the server stops.
        """
        setup = self._setups.of_trainer(self._processes[0], domain, folder)
        return self._calibrators.start(setup, self._shared.fd)

    def keep_calibrators_off(self) -> None:
        """Have calibrators that yield stand still while a lane executes on their core."""
        if not self._calibrators.yielding:
            return
        cores = self._processes[0].lanes[0].cores
        executing = [lane for lane in self._lanes.values() if lane.executes]
        self._calibrators.keep_off(any(not cores or lane.core in cores for lane in executing))

    def free_cores(self) -> list[int]:
        """Return the lanes' cores on which none executes; none where lanes are not pinned."""
        taken = {lane.core for lane in self._lanes.values() if lane.executes}
        return [core for core in self._cores if core not in taken]
