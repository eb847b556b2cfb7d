"""Details of the worst late answers, for the report."""

from collections.abc import Sequence

import msgspec

from serve.obs.frame import Column, Frame


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One late answer: its size, its times by stage, and its co-runners."""

    request_uid: str
    #: Of its server, where the report is about several; else empty.
    machine: str = ""
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
    #: From its arrival at a front until its arrival at the server, no part of the latency.
    front_ms: float = 0.0
    #: Time by stage; the stages sum to the latency.
    stages_ms: dict[str, float]
    lane: int
    group_id: int
    group_size: int
    co_runners: int
    #: Ids of other requests in its group, at most eight.
    group_mates: list[str]


def violations_of(
    late: Frame, mates: Sequence[list[str]], machines: Sequence[str] = ()
) -> list[Violation]:
    """Return the details of late answers, and of each the ids of its `mates` and its machine."""
    stages = {stage: _ms(time) for stage, time in late.stage_ns().items()}
    names = ("latency_ns", "qos_target_ns", "solo_estimate_ns", "run_estimate_ns", "backlog_ns",
             "front_ns")  # fmt: skip
    latency, target, solo, run, backlog, front = (_ms(late[name]) for name in names)
    over = late.over_target.tolist()
    return [
        Violation(
            request_uid=late["request_uid"][i],
            machine=machines[i] if machines else "",
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
            front_ms=front[i],
            stages_ms={stage: time[i] for stage, time in stages.items()},
            lane=int(late["lane"][i]),
            group_id=int(late["group_id"][i]),
            group_size=int(late["group_size"][i]),
            co_runners=int(late["co_runners"][i]),
            group_mates=mates[i],
        )
        for i in range(len(late))
    ]


def _ms(values: Column) -> list[float]:
    plain: list[float] = (values / 1e6).tolist()
    return plain
