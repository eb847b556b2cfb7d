"""The row that the report keeps of a request, made from how the request ended."""

from collections.abc import Callable
from dataclasses import dataclass

from serve.core.rules.cause import violation_cause
from serve.core.types import Completed, Outcome
from serve.errors import ServeError
from serve.obs.record import RequestRecord
from serve.server import clock
from serve.server.api import InferCall, fanouts_text
from serve.server.outcomes import error_of, reason_of, refusal_reason
from serve.server.ticket import RequestTicket

#: Number of ids, their type and fan-outs of a request that brings its graph.
_NO_NODES = (0, "", "")


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The facts that all records of this server share."""

    policy: str
    discipline: str
    #: Names of the devices, as shown to people.
    devices: tuple[str, ...]
    lanes_per_device: int

    def device_of(self, lane_id: int) -> str:
        """Return the device that the lane is on; lanes of trust domains are on the only one."""
        return self.devices[min(lane_id // self.lanes_per_device, len(self.devices) - 1)]


class RecordKeeper:
    """Makes the records of answered requests and passes on those of clients."""

    def __init__(
        self,
        scheduling: Scheduling,
        sink: Callable[[RequestRecord], None],
        routed: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        """`sink` gets the record of every request answered while the server serves.

        `routed` gets those of requests that named no version.
        """
        self._scheduling = scheduling
        self._sink = sink
        self._routed = routed
        #: Requests are the clients', not the server's own: their records are kept.
        self.serving = False
        #: Record of the server's own request that was answered last.
        self.own_record: RequestRecord | None = None

    def keep(self, ticket: RequestTicket, outcome: Outcome, answered_ns: int) -> RequestRecord:
        """Return the record of an answered request, after passing it on."""
        record = build_record(ticket, outcome, answered_ns, self._scheduling)
        if ticket.task.best_effort or ticket.call.is_part:
            return record  # nobody asked for it, or another server keeps that of the whole
        if self.serving:
            self._sink(record)
            if not ticket.call.version:
                self._routed(record)
        else:
            self.own_record = record
        return record


def build_record(
    ticket: RequestTicket, outcome: Outcome, answered_ns: int, scheduling: Scheduling
) -> RequestRecord:
    """Return the record of a request answered at `answered_ns` on the scheduler's clock."""
    if isinstance(outcome, Completed):
        return _run_record(ticket, outcome, answered_ns, scheduling)
    task, call, entry, error = ticket.task, ticket.call, ticket.entry, error_of(outcome)
    num_ids, node_type, fanouts = _NO_NODES if call.graph is None else _nodes_asked(call)
    return RequestRecord(
        request_uid=ticket.request_uid,
        client_id=call.client_id,
        model=entry.spec.name,
        version=str(entry.spec.version),
        tenant=task.tenant,
        priority=task.qos.priority,
        arrived_unix_ns=clock.wall_of(call.arrived_ns),
        num_nodes=task.num_nodes,
        num_edges=task.num_edges,
        graph=call.graph or "",
        graph_version=ticket.inputs.graph_version,
        seed=ticket.inputs.seed,
        num_ids=num_ids,
        node_type=node_type,
        fanouts=fanouts,
        status=error.code.status,
        reason=reason_of(outcome),
        message=str(error),
        policy=scheduling.policy,
        discipline=scheduling.discipline,
        executor=entry.executor,
        device=scheduling.devices[0],
        alone=ticket.alone,
        latency_ns=answered_ns - task.arrived_ns,
        solo_estimate_ns=task.estimate.solo_ns,
        run_estimate_ns=task.estimate.run_ns,
        qos_target_ns=task.qos.target_ns,
        pmc_estimate_bytes=task.estimate.peak_bytes,
        reserve_bytes=task.estimate.reserve_bytes,
        joint_uid="" if ticket.joint is None else ticket.joint.uid,
        trace_parent=call.trace_parent,
        hops=call.hops,
        front_ns=call.front_ns,
    )


def _run_record(
    ticket: RequestTicket, outcome: Completed, answered_ns: int, scheduling: Scheduling
) -> RequestRecord:
    """Return the record of a request that ran; made for each, so in one call."""
    task, call, entry, run = ticket.task, ticket.call, ticket.entry, ticket.run
    assert run is not None
    num_ids, node_type, fanouts = _NO_NODES if call.graph is None else _nodes_asked(call)
    when, where, usage = outcome.timeline, outcome.placement, outcome.usage
    estimate, exposed_ns = task.estimate, when.prepare_exposed_ns
    quet_ns, latency_ns = when.launched_ns - when.arrived_ns, answered_ns - task.arrived_ns
    queue_ns, run_ns = quet_ns - exposed_ns, usage.run_ns - when.suspended_ns
    network_ns = ticket.inputs.network_ns + ticket.parts_ns
    cause = violation_cause(task, outcome, answered_ns, call.front_ns, network_ns)
    return RequestRecord(
        request_uid=ticket.request_uid,
        client_id=call.client_id,
        model=entry.spec.name,
        version=str(entry.spec.version),
        tenant=task.tenant,
        priority=task.qos.priority,
        arrived_unix_ns=clock.wall_of(call.arrived_ns),
        num_nodes=task.num_nodes,
        num_edges=task.num_edges,
        graph=call.graph or "",
        graph_version=ticket.inputs.graph_version,
        seed=ticket.inputs.seed,
        num_ids=num_ids,
        node_type=node_type,
        fanouts=fanouts,
        policy=scheduling.policy,
        discipline=scheduling.discipline,
        executor=entry.executor,
        device=scheduling.device_of(where.lane_id),
        lane=where.lane_id,
        attempt=where.attempt,
        group_id=where.group_id,
        group_size=where.group_size,
        co_runners=where.co_runners,
        merged=where.merged,
        queue_ns=queue_ns if queue_ns > 0 else 0,
        prepare_ns=when.prepared_ns - when.prepare_started_ns,
        prepare_start_ns=when.prepare_started_ns - when.arrived_ns,
        prepare_exposed_ns=exposed_ns,
        quet_ns=quet_ns,
        start_ns=run.began_ns - when.launched_ns if run.began_ns > when.launched_ns else 0,
        run_ns=run_ns if run_ns > 0 else 0,
        suspended_ns=when.suspended_ns,
        answer_ns=answered_ns - when.finished_ns,
        latency_ns=latency_ns,
        backlog_ns=when.backlog_ns,
        alone=ticket.alone and not when.job_run_ns,
        solo_estimate_ns=estimate.solo_ns,
        run_estimate_ns=run.estimate.run_ns,
        qos_target_ns=task.qos.target_ns,
        violated=cause is not None,
        cause=cause or "",
        pmc_estimate_bytes=estimate.peak_bytes,
        reserve_bytes=estimate.reserve_bytes,
        pmc_measured_bytes=run.share_bytes(task, usage.peak_bytes),
        nonfinite_values=ticket.nonfinite_values,
        joint_uid="" if ticket.joint is None else ticket.joint.uid,
        trace_parent=call.trace_parent,
        hops=call.hops,
        front_ns=call.front_ns,
    )


def _nodes_asked(call: InferCall) -> tuple[int, str, str]:
    """Return number and type of the ids of a resident graph, and fan-outs that the call gave."""
    node_type, ids = call.asked
    return ids.shape[0], node_type, "" if call.fanouts is None else fanouts_text(call.fanouts)


def refusal_record(
    uid: str, model: str, version: str, client_id: str, arrived_ns: int, error: ServeError
) -> RequestRecord:
    """Return the record of a request that was refused before it became a task."""
    return RequestRecord(
        request_uid=uid,
        client_id=client_id,
        model=model,
        version=version,
        arrived_unix_ns=clock.wall_of(arrived_ns),
        status=error.code.status,
        reason=refusal_reason(error),
        message=str(error),
        latency_ns=clock.now_ns() - arrived_ns,
    )
