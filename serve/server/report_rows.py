"""The row that the report keeps of a request, made from how the request ended."""

from collections.abc import Callable
from dataclasses import dataclass

from serve.core.rules.cause import violation_cause
from serve.core.types import Completed, Outcome
from serve.errors import ServeError
from serve.obs.record import RequestRecord
from serve.server import clock
from serve.server.outcomes import error_of, reason_of, refusal_reason
from serve.server.ticket import RequestTicket


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The facts that all records of this server share."""

    policy: str
    discipline: str
    #: Names of the devices, as shown to people.
    devices: tuple[str, ...]
    lanes_per_device: int


class RecordKeeper:
    """Makes the records of answered requests and passes on those of clients."""

    def __init__(self, scheduling: Scheduling, sink: Callable[[RequestRecord], None]) -> None:
        """`sink` gets the record of every request answered while the server serves."""
        self._scheduling = scheduling
        self._sink = sink
        #: Requests are the clients', not the server's own: their records are kept.
        self.serving = False
        #: Record of the server's own request that was answered last.
        self.own_record: RequestRecord | None = None

    def keep(self, ticket: RequestTicket, outcome: Outcome, answered_ns: int) -> RequestRecord:
        """Return the record of an answered request, after passing it on."""
        record = build_record(ticket, outcome, answered_ns, self._scheduling)
        if self.serving:
            self._sink(record)
        else:
            self.own_record = record
        return record


def build_record(
    ticket: RequestTicket, outcome: Outcome, answered_ns: int, scheduling: Scheduling
) -> RequestRecord:
    """Return the record of a request answered at `answered_ns` on the scheduler's clock."""
    task = ticket.task
    call = ticket.call
    error = None if isinstance(outcome, Completed) else error_of(outcome)
    facts: dict[str, object] = {
        "request_uid": ticket.request_uid,
        "client_id": call.client_id,
        "model": ticket.entry.spec.name,
        "version": str(ticket.entry.spec.version),
        "tenant": task.tenant,
        "priority": task.qos.priority,
        "arrived_unix_ns": clock.wall_of(call.arrived_ns),
        "num_nodes": task.num_nodes,
        "num_edges": task.num_edges,
        "graph": call.graph or "",
        "graph_version": ticket.inputs.graph_version,
        "seed": ticket.inputs.seed,
        "status": "OK" if error is None else error.code.status,
        "reason": reason_of(outcome),
        "message": "" if error is None else str(error),
        "policy": scheduling.policy,
        "discipline": scheduling.discipline,
        "executor": ticket.entry.executor,
        "device": scheduling.devices[0],
        "alone": ticket.alone,
        "latency_ns": answered_ns - task.arrived_ns,
        "solo_estimate_ns": task.estimate.solo_ns,
        "run_estimate_ns": task.estimate.run_ns,
        "qos_target_ns": task.qos.target_ns,
        "pmc_estimate_bytes": task.estimate.peak_bytes,
        "reserve_bytes": task.reserve_bytes,
    }
    if isinstance(outcome, Completed):
        facts |= _run_facts(ticket, outcome, answered_ns)
        number = outcome.placement.lane_id // scheduling.lanes_per_device
        facts["device"] = scheduling.devices[number]
    return RequestRecord(**facts)  # type: ignore[arg-type]  # names are checked by its decoder


def _run_facts(ticket: RequestTicket, outcome: Completed, answered_ns: int) -> dict[str, object]:
    task, when, where = ticket.task, outcome.timeline, outcome.placement
    run = ticket.run
    assert run is not None
    prepare_ns = when.prepared_ns - when.prepare_started_ns
    quet_ns = when.launched_ns - when.arrived_ns
    cause = violation_cause(task, outcome, answered_ns)
    return {
        "lane": where.lane_id,
        "attempt": where.attempt,
        "group_id": where.group_id,
        "group_size": where.group_size,
        "merged": where.merged,
        "co_runners": where.co_runners,
        "queue_ns": max(0, quet_ns - when.prepare_exposed_ns),
        "prepare_ns": prepare_ns,
        "prepare_exposed_ns": when.prepare_exposed_ns,
        "quet_ns": quet_ns,
        "run_estimate_ns": run.estimate.run_ns,
        "run_ns": max(0, outcome.usage.run_ns - when.suspended_ns),
        "suspended_ns": when.suspended_ns,
        "answer_ns": answered_ns - when.finished_ns,
        "backlog_ns": when.backlog_ns,
        "violated": cause is not None,
        "cause": cause or "",
        "pmc_measured_bytes": run.share_bytes(task, outcome.usage.peak_bytes),
    }


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
