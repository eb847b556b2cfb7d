"""What is kept for the report: one row per answered request and one per start of the server.

A request's record is also what its client is told of it.
"""

from typing import Final

import msgspec

#: Characters kept of an error's text, as many as a client is told.
MAX_MESSAGE: Final = 1000
#: Characters kept of a name that clients choose.
MAX_NAME: Final = 256
_MOST_BY_FIELD: Final = {
    "message": MAX_MESSAGE,
    **dict.fromkeys(("client_id", "model", "version", "tenant", "graph"), MAX_NAME),
}


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known of a request once it is answered. Times in ns, sizes in bytes."""

    request_uid: str
    #: The id the client sent, empty if none.
    client_id: str = ""
    model: str
    version: str
    tenant: str = ""
    priority: int = 0
    #: Wall clock at arrival, ns since the epoch.
    arrived_unix_ns: int
    num_nodes: int = 0
    num_edges: int = 0
    #: Resident graph and its version, for requests by node id: with the seed, what was sampled.
    graph: str = ""
    graph_version: int = 0
    seed: int | None = None
    #: `OK` or the gRPC status name.
    status: str = "OK"
    #: Empty for OK; else a RejectReason or FailReason value, `deadline` or `cancelled`.
    reason: str = ""
    message: str = ""
    policy: str = ""
    discipline: str = ""
    executor: str = ""
    device: str = ""
    #: -1: never launched.
    lane: int = -1
    attempt: int = 0
    group_id: int = -1
    group_size: int = 0
    co_runners: int = 0
    #: Requests of one model that ran as one, this one included; 0: never launched.
    merged: int = 0
    #: Arrival until launched, less the part of the prepare no other work hid.
    queue_ns: int = 0
    prepare_ns: int = 0
    #: The part of `prepare_ns` during which an idle lane waited for it.
    prepare_exposed_ns: int = 0
    #: First execution − arrival (QUET).
    quet_ns: int = 0
    #: On the lane, less `suspended_ns`; of the whole run where it was merged with others.
    run_ns: int = 0
    #: Stopped on the lane for more urgent requests.
    suspended_ns: int = 0
    #: Lane done until the answer was handed to the transport.
    answer_ns: int = 0
    #: Answer − arrival (JCT).
    latency_ns: int = 0
    backlog_ns: int = 0
    #: Came to a server that was idle for a while, and no other came until it was answered: its
    #: latency is a solo time.
    alone: bool = False
    solo_estimate_ns: int = 0
    #: Of the run it was part of.
    run_estimate_ns: int = 0
    qos_target_ns: int = 0
    violated: bool = False
    #: Empty unless violated: queue, prepare, interference, estimate or overload.
    cause: str = ""
    pmc_estimate_bytes: int = 0
    reserve_bytes: int = 0
    #: None where the lane could not measure it. Of a merged run its share.
    pmc_measured_bytes: int | None = None
    #: Requests that ended as this one did, before they reached a lane, and have no row.
    left_out: int = 0

    def __post_init__(self) -> None:
        """Shorten what clients can make long."""
        for name, most in _MOST_BY_FIELD.items():
            text: str = getattr(self, name)
            if len(text) > most:
                msgspec.structs.force_setattr(self, name, text[: most - 1] + "…")


class ServerRun(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the server: what the requests answered after it ran under."""

    #: Wall clock, ns since the epoch.
    started_unix_ns: int
    version: str
    #: As shown to people: `cpu`, or the name of a CUDA device starting with `cuda`.
    device: str
    lanes: int
    #: Device memory that tasks may reserve.
    budget_bytes: int
    policy: str
    discipline: str
    window: str
    qos_factor: float
    pid: int
