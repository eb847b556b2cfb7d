"""Rows of the report: one per finished request and one per start of the server.

A request's record also gives the QoS facts that its client receives.
"""

from typing import Final

import msgspec

#: Most characters kept of an error's text, the same as a client gets.
MAX_MESSAGE: Final = 1000
#: Most characters kept of a name that clients choose.
MAX_NAME: Final = 256
_MOST_BY_FIELD: Final = {
    "message": MAX_MESSAGE,
    **dict.fromkeys(("client_id", "model", "version", "tenant", "graph"), MAX_NAME),
}


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a finished request. Times in ns, sizes in bytes."""

    request_uid: str
    #: Id that the client sent; may be empty.
    client_id: str = ""
    model: str
    version: str
    tenant: str = ""
    priority: int = 0
    #: Arrival by the wall clock, ns since the epoch.
    arrived_unix_ns: int
    num_nodes: int = 0
    num_edges: int = 0
    #: Resident graph and its version, for requests by node id; with the seed they fix the sample.
    graph: str = ""
    graph_version: int = 0
    seed: int | None = None
    #: Number of node ids asked for, their type, and fan-outs that the request gave.
    num_ids: int = 0
    node_type: str = ""
    fanouts: str = ""
    #: `OK` or gRPC's name of the status.
    status: str = "OK"
    #: Empty for OK, else a RejectReason or FailReason value, `deadline` or `cancelled`.
    reason: str = ""
    message: str = ""
    policy: str = ""
    discipline: str = ""
    executor: str = ""
    device: str = ""
    #: -1 when never launched.
    lane: int = -1
    attempt: int = 0
    group_id: int = -1
    group_size: int = 0
    co_runners: int = 0
    #: Number of requests of one model that ran as one, this one included; 0 if never launched.
    merged: int = 0
    #: Time from arrival to launch, without `prepare_exposed_ns`.
    queue_ns: int = 0
    prepare_ns: int = 0
    #: Part of `prepare_ns` during which an idle lane waited for it; other work hid the rest.
    prepare_exposed_ns: int = 0
    #: First execution − arrival (queueing time, QUET).
    quet_ns: int = 0
    #: Time from the launch until the lane began the run; 0 where that is not known.
    start_ns: int = 0
    #: Time on the lane without `suspended_ns`; of the whole run if merged with other requests.
    run_ns: int = 0
    #: Time suspended on the lane for more urgent requests.
    suspended_ns: int = 0
    #: Time from the lane's end to handing the answer to the transport.
    answer_ns: int = 0
    #: Answer − arrival (job completion time, JCT).
    latency_ns: int = 0
    backlog_ns: int = 0
    #: True when the latency is a solo time: the server had been idle for a while, and no other
    #: request arrived before the answer.
    alone: bool = False
    solo_estimate_ns: int = 0
    #: Estimate for the run that the request was part of.
    run_estimate_ns: int = 0
    qos_target_ns: int = 0
    violated: bool = False
    #: Cause of a violation: queue, prepare, interference, estimate, overload or network;
    #: else empty.
    cause: str = ""
    pmc_estimate_bytes: int = 0
    reserve_bytes: int = 0
    #: None when the lane could not measure it; the request's share of a merged run.
    pmc_measured_bytes: int | None = None
    #: Values of the answer that are NaN or infinite.
    nonfinite_values: int = 0
    #: Id common to the rows of a joint request, which asked several models; else empty.
    joint_uid: str = ""
    #: Number of requests without a row that ended like this one before they reached a lane.
    left_out: int = 0
    #: Time from arrival to the begin of preparation, negative if it began while bytes came; 0
    #: where the request did not run.
    prepare_start_ns: int = 0
    #: The client's span, see ``trace_ids``; empty for none.
    trace_parent: str = ""
    #: Servers that have passed it on to this one.
    hops: int = 0
    #: Time from its arrival at a front until its arrival here; 0 where none tells it.
    front_ns: int = 0

    def __post_init__(self) -> None:
        """Shorten the texts that clients choose."""
        if (
            len(self.message) <= MAX_MESSAGE
            and len(self.client_id) <= MAX_NAME
            and len(self.model) <= MAX_NAME
            and len(self.version) <= MAX_NAME
            and len(self.tenant) <= MAX_NAME
            and len(self.graph) <= MAX_NAME
        ):
            return
        for name, most in _MOST_BY_FIELD.items():
            text: str = getattr(self, name)
            if len(text) > most:
                msgspec.structs.force_setattr(self, name, text[: most - 1] + "…")


class ServerRun(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the server, with the settings of all requests that it answered."""

    #: Wall clock, ns since the epoch.
    started_unix_ns: int
    version: str
    #: Name for people: `cpu`, or the name of a CUDA device, which starts with `cuda`.
    device: str
    #: The server's slots: how many of its lanes run at once. The column is older than the word.
    lanes: int
    #: Device memory that tasks may reserve.
    budget_bytes: int
    policy: str
    discipline: str
    window: str
    qos_factor: float
    pid: int
    #: Rows that this run's database could not take, as far as it could say.
    rows_lost: int = 0
    #: Lanes that it started with; more than run at once where a suspended task keeps its lane.
    #: 0 where an older version wrote the row.
    lanes_started: int = 0

    @property
    def lanes_told(self) -> str:
        """Number of lanes in words: `8 lanes, 2 at once`."""
        started = self.lanes_started or self.lanes
        lanes = f"{started} {'lane' if started == 1 else 'lanes'}"
        return lanes if started == self.lanes else f"{lanes}, {self.lanes} at once"
