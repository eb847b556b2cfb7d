"""Trust domains whose models are served or being loaded: each has lanes of its own meanwhile.

The scheduler decides on the lanes. This counts the versions of models that need them.
"""

import threading
from collections import Counter
from collections.abc import Callable

from serve.core.events import DomainClosed, DomainOpened, Event
from serve.errors import NotReady
from serve.models.repository import ModelSpec
from serve.server.lanes.lane_models import LaneModels
from serve.server.lanes.pool import LanePool
from serve.server.load_turns import LoadCancellation


class LaneDomains:
    """The trust domains that versions of models are in. Any thread."""

    def __init__(self, pool: LanePool, models: LaneModels, tell: Callable[[Event], None]) -> None:
        """`tell` gives the scheduler an event."""
        self._pool, self._models, self._tell = pool, models, tell
        #: Versions by trust domain. The lock is held until the scheduler knows.
        self._versions: Counter[str] = Counter()
        self._lock = threading.Lock()

    def require(self, spec: ModelSpec) -> None:
        """Raise NotReady where there can be no lanes for the version."""
        if spec.domain and self._pool.successors is None:  # lanes share a process
            raise NotReady(
                f"model {spec.key}: isolation = '{spec.isolation}': there are lanes of its own for"
                " it on processors only"
            )

    def enter(self, spec: ModelSpec, cancellation: LoadCancellation) -> None:
        """Count a version, and return when there is a lane for it.

        Raises NotReady when there can be none, or none comes up in time, and RequestCancelled; then
        the version is not counted.
        """
        if not spec.domain or not self._pool.runs:
            return
        with self._lock:
            if not self._pool.has_room_for_lanes:
                raise NotReady(
                    f"model {spec.key}: isolation = '{spec.isolation}': {len(self._versions)} trust"
                    " domains have all lanes that there can be"
                )
            self._versions[spec.domain] += 1
            if self._versions[spec.domain] == 1:
                self._tell(DomainOpened(spec.domain))
        try:
            self._models.wait_lanes(spec, cancellation)
        except BaseException:
            self.leave(spec)
            raise

    def leave(self, spec: ModelSpec) -> None:
        """Count the version no more: it is on no lane, and none of its requests is left."""
        if not spec.domain or not self._pool.runs:
            return
        with self._lock:
            self._versions[spec.domain] -= 1
            if not self._versions[spec.domain]:
                del self._versions[spec.domain]
                self._tell(DomainClosed(spec.domain))
