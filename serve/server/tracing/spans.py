"""The spans of a request, in OpenTelemetry's classes; for the process that exports them."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from serve.obs.record import RequestRecord
from serve.obs.trace_ids import TraceIds, span_id_of, trace_of

#: What OpenTelemetry calls the code that made spans.
_SCOPE = InstrumentationScope("gnnserve")
#: Attributes of the request's span, by field of its record. Fields that say nothing are left out.
_ATTRIBUTES = {
    "model": "gnnserve.model",
    "version": "gnnserve.version",
    "tenant": "gnnserve.tenant",
    "request_uid": "gnnserve.request_uid",
    "joint_uid": "gnnserve.joint_uid",
    "client_id": "gnnserve.client_id",
    "num_nodes": "gnnserve.nodes",
    "num_edges": "gnnserve.edges",
    "graph": "gnnserve.graph",
    "status": "gnnserve.status",
    "reason": "gnnserve.reason",
    "qos_target_ns": "gnnserve.qos.target_ns",
    "violated": "gnnserve.qos.late",
    "cause": "gnnserve.qos.cause",
    "solo_estimate_ns": "gnnserve.solo_estimate_ns",
    "pmc_estimate_bytes": "gnnserve.memory.estimate_bytes",
    "reserve_bytes": "gnnserve.memory.reserved_bytes",
    "pmc_measured_bytes": "gnnserve.memory.measured_bytes",
}
#: Attributes of the span of the run.
_OF_RUN = {
    "device": "gnnserve.device",
    "executor": "gnnserve.executor",
    "attempt": "gnnserve.attempt",
    "co_runners": "gnnserve.co_runners",
    "group_size": "gnnserve.group.size",
    "merged": "gnnserve.merged",
    "run_estimate_ns": "gnnserve.run.estimate_ns",
    "suspended_ns": "gnnserve.run.suspended_ns",
}


class GroupMates:
    """Spans of traced requests by the group that they were planned in, to link them.

    Requests of a group end at about the same time, so groups of a while ago are forgotten.
    """

    def __init__(self, most_groups: int = 1000, most_links: int = 32) -> None:
        """Keep so many groups, and so many of the latest requests of each."""
        self._most_groups, self._most_links = most_groups, most_links
        self._groups: OrderedDict[int, list[tuple[str, TraceIds]]] = OrderedDict()

    def add(self, records: Iterable[RequestRecord], share: float) -> None:
        """Take in finished requests, before links to them are asked for."""
        for record in records:
            ids = trace_of(record, share)
            if ids is None or record.group_size < 2 or record.lane < 0:
                continue
            mates = self._groups.setdefault(record.group_id, [])
            self._groups.move_to_end(record.group_id)
            mates.append((record.request_uid, ids))
            del mates[: -self._most_links]
        while len(self._groups) > self._most_groups:
            self._groups.popitem(last=False)

    def links(self, record: RequestRecord) -> list[Link]:
        """Return links to the spans of the others in the request's group that are known so far."""
        if record.group_size < 2 or record.lane < 0:
            return []
        return [
            Link(_context(ids.trace_id, ids.span_id), {"gnnserve.link": "group"})
            for uid, ids in self._groups.get(record.group_id, ())
            if uid != record.request_uid
        ]


def _context(trace_id: str, span_id: str, *, remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(trace_id, 16), int(span_id, 16), remote, flags)


def spans_of(
    record: RequestRecord, share: float, resource: Resource, links: Sequence[Link] = ()
) -> list[ReadableSpan]:
    """Return the spans of a finished request; none if it is not traced.

    The first is the request's own, which has the links. `wait`, `run` and `answer` follow each
    other and fill it; `stage` is the part of `wait` in which the inputs were prepared.
    """
    trace = trace_of(record, share)
    if trace is None:
        return []
    uid = record.request_uid.encode()
    context = partial(_context, trace.trace_id)
    failed = Status(StatusCode.ERROR, record.message or record.reason or record.status)
    make = partial(ReadableSpan, resource=resource, instrumentation_scope=_SCOPE)
    own = context(trace.span_id)
    found = [
        make(
            f"infer {record.model}",
            context=own,
            parent=context(trace.parent_id, remote=True) if trace.parent_id else None,
            attributes=_attributes(record, _ATTRIBUTES),
            kind=SpanKind.SERVER,
            links=links,
            status=Status(StatusCode.UNSET) if record.status == "OK" else failed,
            start_time=record.arrived_unix_ns,
            end_time=record.arrived_unix_ns + record.latency_ns,
        )
    ]
    inside = {"": own}
    for name, parent, start_ns, end_ns, attributes in _stages(record):
        inside[name] = context(span_id_of(uid, name))
        found.append(
            make(
                name,
                context=inside[name],
                parent=inside[parent],
                attributes=attributes,
                start_time=start_ns,
                end_time=end_ns,
            )
        )
    return found


def _stages(
    record: RequestRecord,
) -> Iterator[tuple[str, str, int, int, Mapping[str, str | int | bool]]]:
    """Yield name, name of the stage that it is a part of, start, end and attributes."""
    if record.lane < 0:
        return
    arrived = record.arrived_unix_ns
    launched, ended = arrived + record.quet_ns, arrived + record.latency_ns
    finished = ended - record.answer_ns
    yield "wait", "", arrived, launched, {"gnnserve.backlog_ns": record.backlog_ns}
    if record.prepare_ns > 0:
        # It may have begun while bytes of the request came.
        began = arrived + record.prepare_start_ns
        start, end = (
            min(max(time, arrived), launched) for time in (began, began + record.prepare_ns)
        )
        exposed = {
            "gnnserve.prepare_ns": record.prepare_ns,
            "gnnserve.prepare.exposed_ns": record.prepare_exposed_ns,
        }
        yield "stage", "wait", start, end, exposed
    of_run = _attributes(record, _OF_RUN)
    # These count from 0.
    of_run |= {"gnnserve.lane": record.lane, "gnnserve.group.id": record.group_id}
    yield "run", "", launched, finished, of_run
    yield "answer", "", finished, ended, {}


def _attributes(record: RequestRecord, names: Mapping[str, str]) -> dict[str, str | int | bool]:
    found = {}
    for field, name in names.items():
        value = getattr(record, field)
        if value or field == "violated":
            found[name] = value
    return found
