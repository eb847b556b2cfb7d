"""Which calls have which threads, and how many: so that none of a kind keeps others from theirs."""

from grpc_reflection.v1alpha import reflection

from serve.rpc import gnnserve_service as own
from serve.rpc import service
from serve.rpc.workers import Workers
from serve.wire.messages import STREAM_METHOD

HEALTH = "grpc.health.v1.Health"

#: Calls that stay open, by kind.
MAX_STREAMS, MAX_WATCHERS, MAX_REFLECTIONS = 64, 256, 8
#: Threads beyond those that wait for accepted requests or serve open calls: for refusals and for
#: the methods not named here.
_SPARE_THREADS = 32
#: Threads for questions that are answered at once, and those of them that are always there.
_PROBE_THREADS, _PROBE_THREADS_KEPT = 16, 2
#: Threads for what changes or looks through a lot.
_ADMIN_THREADS = 16

_PROBES = (
    *(f"/{HEALTH}/{method}" for method in ("Check", "List")),
    *(
        f"/{service.NAME}/{method}"
        for method in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata")
    ),
)
_ADMIN = (
    f"/{service.NAME}/RepositoryModelLoad",
    f"/{service.NAME}/RepositoryModelUnload",
    f"/{own.NAME}/UpdateGraph",
    f"/{own.NAME}/Report",
)
_OPEN = (
    STREAM_METHOD,
    f"/{HEALTH}/Watch",
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
)


class Allotment:
    """The threads of a server that takes `max_queue` requests."""

    def __init__(self, max_queue: int) -> None:
        # Tenants within their share enter a full queue too, so up to twice as many may wait.
        most = 2 * max_queue + _SPARE_THREADS
        #: Calls that one connection may have: it can fill the queue and be told so, and no more.
        self.calls_of_a_connection = most
        self.ordinary = Workers(most, "rpc", most_waiting=most)
        self.probes = Workers(
            _PROBE_THREADS, "rpc-probe", most_waiting=_PROBE_THREADS, kept=_PROBE_THREADS_KEPT
        )
        self.admin = Workers(_ADMIN_THREADS, "rpc-admin", most_waiting=_ADMIN_THREADS)
        most_open = MAX_STREAMS + MAX_WATCHERS + MAX_REFLECTIONS + _SPARE_THREADS
        self.open = Workers(most_open, "rpc-open", most_waiting=most_open)
        #: For the requests of streams; what waits is bounded by the windows of the streams.
        self.streamed = Workers(most, "rpc-stream")

    def by_path(self) -> dict[str, Workers]:
        """The threads of each method that does not have the ordinary ones."""
        return {
            **dict.fromkeys(_PROBES, self.probes),
            **dict.fromkeys(_ADMIN, self.admin),
            **dict.fromkeys(_OPEN, self.open),
        }
