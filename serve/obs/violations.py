"""Details of the worst late answers, for the report."""

import msgspec
import numpy as np

from serve.obs.frame import Column, Frame

_MATES = 8


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One late answer: its size, its times by stage, and its co-runners."""

    request_uid: str
    client_id: str
    model: str
    tenant: str
    cause: str
    arrived_unix_ns: int
    num_nodes: int
    num_edges: int
    latency_ms: float
    qos_target_ms: float
    latency_over_qt: float
    solo_estimate_ms: float
    run_estimate_ms: float
    backlog_ms: float
    #: Time by stage; the stages sum to the latency.
    stages_ms: dict[str, float]
    lane: int
    group_id: int
    group_size: int
    co_runners: int
    #: Ids of other requests in its group, at most eight.
    group_mates: list[str]


def worst_violations(frame: Frame, count: int) -> list[Violation]:
    """Return the late answers furthest beyond their target, worst first."""
    late = frame.where(frame.violated)
    order = np.argsort(-late.over_target, kind="stable")[:count]
    late = late.where(order)
    stages = {stage: _ms(time) for stage, time in late.stage_ns().items()}
    names = ("latency_ns", "qos_target_ns", "solo_estimate_ns", "run_estimate_ns", "backlog_ns")
    latency, target, solo, run, backlog = (_ms(late[name]) for name in names)
    over = late.over_target.tolist()
    return [
        Violation(
            request_uid=late["request_uid"][i],
            client_id=late["client_id"][i],
            model=late["model"][i],
            tenant=late["tenant"][i],
            cause=late["cause"][i],
            arrived_unix_ns=int(late["arrived_unix_ns"][i]),
            num_nodes=int(late["num_nodes"][i]),
            num_edges=int(late["num_edges"][i]),
            latency_ms=latency[i],
            qos_target_ms=target[i],
            latency_over_qt=over[i],
            solo_estimate_ms=solo[i],
            run_estimate_ms=run[i],
            backlog_ms=backlog[i],
            stages_ms={stage: time[i] for stage, time in stages.items()},
            lane=int(late["lane"][i]),
            group_id=int(late["group_id"][i]),
            group_size=int(late["group_size"][i]),
            co_runners=int(late["co_runners"][i]),
            group_mates=_mates(frame, late, i),
        )
        for i in range(len(late))
    ]


def _mates(frame: Frame, late: Frame, i: int) -> list[str]:
    group = late["group_id"][i]
    if group < 0:
        return []
    same = (frame["group_id"] == group) & (frame["run_id"] == late["run_id"][i])
    uids = frame["request_uid"][same].tolist()
    return [uid for uid in uids if uid != late["request_uid"][i]][:_MATES]


def _ms(values: Column) -> list[float]:
    plain: list[float] = (values / 1e6).tolist()
    return plain
