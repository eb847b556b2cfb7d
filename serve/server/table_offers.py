"""Offers of the resident graphs' features to the devices, which gather from them in place."""

from serve.core.types import LaneId
from serve.server.graphs import GraphStore
from serve.server.lanes.pool import LanePool


class TableOffers:
    """Has devices map the features of graphs before requests need them. Any thread."""

    def __init__(self, pool: LanePool, graphs: GraphStore) -> None:
        self._pool = pool
        self._graphs = graphs

    def offer(self) -> None:
        """Offer the features as they are now to every device."""
        for lane_ids in self._pool.lane_ids_by_device:
            self._send(lane_ids[0])

    def lane_up(self, lane_id: LaneId) -> None:
        """Offer the features to a device that came back, through its first lane."""
        if any(lane_id == lane_ids[0] for lane_ids in self._pool.lane_ids_by_device):
            self._send(lane_id)

    def _send(self, lane_id: LaneId) -> None:
        for message in self._graphs.tables.offers():
            self._pool.send(lane_id, message)
