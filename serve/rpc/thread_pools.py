"""Thread pools by kind of call, so that calls of one kind cannot starve the others."""

from grpc_reflection.v1alpha import reflection

from serve.rpc import gnnserve_service as own
from serve.rpc import service
from serve.rpc.workers import Workers
from serve.wire.messages import STREAM_METHOD

HEALTH = "grpc.health.v1.Health"

#: Limits of calls that stay open, by kind.
MAX_STREAMS, MAX_WATCHERS, MAX_REFLECTIONS, MAX_JOB_WATCHERS = 64, 256, 8, 64
#: Threads beyond those that wait for accepted requests or serve open calls. They send refusals and
#: serve the methods that have no pool of their own.
_SPARE_THREADS = 32
#: Threads for calls that are answered at once, and how many of them always exist.
_PROBE_THREADS, _PROBE_THREADS_KEPT = 16, 2
#: Threads for calls that change or read a lot of state.
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
    *(f"/{own.NAME}/{method}" for method in ("SubmitJob", "ListJobs", "CancelJob")),
)
_OPEN = (
    STREAM_METHOD,
    f"/{HEALTH}/Watch",
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
    f"/{own.NAME}/WatchJob",
)


class ThreadPools:
    """The thread pools of a server that accepts `max_queue` requests at once."""

    def __init__(self, max_queue: int) -> None:
        most = _most_calls(max_queue)
        #: Limit of concurrent calls on one connection: enough to fill the queue and be refused.
        self.calls_of_a_connection = most
        self.ordinary = Workers(most, "rpc", most_waiting=most)
        self.probes = Workers(
            _PROBE_THREADS, "rpc-probe", most_waiting=_PROBE_THREADS, kept=_PROBE_THREADS_KEPT
        )
        self.admin = Workers(_ADMIN_THREADS, "rpc-admin", most_waiting=_ADMIN_THREADS)
        most_open = MAX_STREAMS + MAX_WATCHERS + MAX_REFLECTIONS + MAX_JOB_WATCHERS
        most_open += _SPARE_THREADS
        self.open = Workers(most_open, "rpc-open", most_waiting=most_open)
        #: For the requests of streams; the windows of the streams bound this pool's backlog.
        self.streamed = Workers(most, "rpc-stream")

    def accept(self, max_queue: int) -> None:
        """Have threads for another `max_queue`; that of a connection's calls stays."""
        most = _most_calls(max_queue)
        self.ordinary.allow(most, most)
        self.streamed.allow(most, None)

    def by_path(self) -> dict[str, Workers]:
        """Return the pool of each method that does not use the ordinary one."""
        return {
            **dict.fromkeys(_PROBES, self.probes),
            **dict.fromkeys(_ADMIN, self.admin),
            **dict.fromkeys(_OPEN, self.open),
        }


def _most_calls(max_queue: int) -> int:
    """Return how many calls may wait at once."""
    # A tenant below its share may enter a full queue, so up to twice as many may wait.
    return 2 * max_queue + _SPARE_THREADS
