"""Our own service, for what the standard lacks; method names are those of `gnnserve.proto`."""

from collections.abc import Callable, Iterable
from typing import Any

import grpc
from google.protobuf import json_format

from serve.errors import InvalidInput
from serve.obs.record import ServerRun
from serve.pb import POOL
from serve.pb import gnnserve_pb2 as pb
from serve.rpc import describe
from serve.rpc.graph_update import decode_change, parse_update
from serve.rpc.open_calls import OpenCallLimit
from serve.rpc.parameters import parse_fanouts
from serve.server.api import Inference, ModelInfo
from serve.server.training.job_facts import LEARNING_RATE, JobCall
from serve.server.version_facts import VersionChange

NAME = "gnnserve.v1.GnnServe"
#: Methods that take and return serialized messages.
AS_BYTES = ("UpdateGraph",)

#: Most nodes or edges in an estimate; bytes and nanoseconds of larger graphs would overflow.
_MAX_COUNT = 10**12

#: Makes the QoS report over the last so many seconds (0: all), in its JSON shape.
ReportSource = Callable[[float], dict[str, Any]]


class GnnServeService:
    """Implements `gnnserve.v1.GnnServe`."""

    def __init__(
        self,
        engine: Inference,
        facts: Callable[[], ServerRun],
        report: ReportSource,
        max_message_bytes: int,
        job_watches: OpenCallLimit,
        node: Callable[[], str],
    ) -> None:
        """`node` returns this server's name among others; empty where it knows of none."""
        self._engine = engine
        self._facts = facts
        self._report = report
        self._max_message_bytes = max_message_bytes
        self._job_watches = job_watches
        self._node = node

    def Describe(self, _: pb.DescribeRequest, __: object) -> pb.DescribeResponse:
        """Describe the server's device and scheduling."""
        facts, room = self._facts(), self._engine.moving.room
        return pb.DescribeResponse(
            version=facts.version,
            device=facts.device,
            slots=facts.lanes,
            budget_bytes=facts.budget_bytes,
            policy=facts.policy,
            discipline=facts.discipline,
            window=facts.window,
            qos_factor=facts.qos_factor,
            max_message_bytes=self._max_message_bytes,
            node=self._node(),
            unanswered=room.unanswered,
            models=sorted(_names_of(self._engine.served())),
            graphs=[graph.name for graph in self._engine.graphs()],
            part=room.part,
        )

    def Estimate(self, request: pb.EstimateRequest, _: object) -> pb.EstimateResponse:
        """Estimate a request of a given size, or one by node ids of a resident graph."""
        for name in ("num_nodes", "num_edges", "num_ids"):
            value = getattr(request, name)
            if value < 0:
                raise InvalidInput(f"{name}: {value} is negative")
            if value > _MAX_COUNT:
                raise InvalidInput(f"{name}: {value} is more than {_MAX_COUNT}")
        if request.graph:
            if request.num_nodes or request.num_edges:
                raise InvalidInput(
                    f"graph '{request.graph}': give num_ids for a resident graph, "
                    "not num_nodes and num_edges"
                )
            return describe.estimate(
                self._engine.estimate_sample(
                    request.model,
                    request.version,
                    request.graph,
                    request.num_ids,
                    parse_fanouts(request.fanouts or None),
                    request.node_type or None,
                )
            )
        for name in ("num_ids", "fanouts", "node_type"):
            if getattr(request, name):
                raise InvalidInput(f"{name}: has no meaning without a graph")
        if request.num_nodes == 0 and request.num_edges > 0:
            raise InvalidInput(f"num_edges: {request.num_edges} edges in a graph of 0 nodes")
        return describe.estimate(
            self._engine.estimate(
                request.model, request.version, request.num_nodes, request.num_edges
            )
        )

    def ListGraphs(self, request: pb.ListGraphsRequest, _: object) -> pb.ListGraphsResponse:
        """List all resident graphs, or the one of a given name."""
        graphs = self._engine.graphs(request.name)
        return pb.ListGraphsResponse(graphs=[describe.graph(found) for found in graphs])

    def UpdateGraph(self, message: bytes, _: object) -> bytes:
        """Change a resident graph, wholly or not at all."""
        request = parse_update(message)
        if request.if_version < 0:
            raise InvalidInput(f"if_version: {request.if_version} is negative")
        found = self._engine.update_graph(
            request.graph, decode_change(request), request.if_version or None
        )
        return pb.UpdateGraphResponse(graph=describe.graph(found)).SerializeToString()

    def ListVersions(self, request: pb.ListVersionsRequest, _: object) -> pb.ListVersionsResponse:
        """List which versions answer requests that name none, of one model or of all."""
        found = self._engine.versions(request.model)
        return pb.ListVersionsResponse(models=[describe.versions(one) for one in found])

    def ChangeVersions(
        self, request: pb.ChangeVersionsRequest, _: object
    ) -> pb.ChangeVersionsResponse:
        """Change that for one model."""
        which = request.WhichOneof("change")
        if which == "split":
            split = request.split
            change = VersionChange(split=dict(split.shares), canary=split.canary or None)
        elif which == "shadow":
            shadow = request.shadow
            change = VersionChange(shadow=shadow.version, shadow_percent=shadow.percent or 100.0)
        else:
            change = VersionChange(roll_back=request.roll_back)
        found = self._engine.change_versions(request.model, change)
        return pb.ChangeVersionsResponse(model=describe.versions(found))

    def SubmitJob(self, request: pb.SubmitJobRequest, _: object) -> pb.SubmitJobResponse:
        """Have a model trained."""
        call = JobCall(
            request.model,
            request.graph,
            request.epochs,
            request.learning_rate or LEARNING_RATE,
            request.seed,
            request.fresh,
            request.priority,
        )
        return pb.SubmitJobResponse(job=describe.job(self._engine.training.submit(call)))

    def ListJobs(self, _: pb.ListJobsRequest, __: object) -> pb.ListJobsResponse:
        """List training jobs."""
        return pb.ListJobsResponse(jobs=map(describe.job, self._engine.training.jobs()))

    def WatchJob(
        self, request: pb.WatchJobRequest, context: grpc.ServicerContext
    ) -> pb.WatchJobResponse:
        """Wait until a job has got on or has ended, for a few seconds at most."""
        if not self._job_watches.enter(context):
            return pb.WatchJobResponse()
        seen = describe.seen_job(request.seen) if request.HasField("seen") else None
        return pb.WatchJobResponse(
            job=describe.job(self._engine.training.watch(request.job_id, seen))
        )

    def CancelJob(self, request: pb.CancelJobRequest, _: object) -> pb.CancelJobResponse:
        """End a job."""
        return pb.CancelJobResponse(job=describe.job(self._engine.training.cancel(request.job_id)))

    def Report(self, request: pb.ReportRequest, _: object) -> pb.ReportResponse:
        """Return the QoS report."""
        if not request.since_s >= 0:
            raise InvalidInput(f"since_s: {request.since_s} is not at least 0")
        found = self._report(request.since_s)
        # A report may have fields that the message does not have yet.
        return json_format.ParseDict(
            found, pb.ReportResponse(), ignore_unknown_fields=True, descriptor_pool=POOL
        )


def _names_of(served: Iterable[ModelInfo]) -> set[str]:
    """Return what requests may call the models that take requests, with and without a version."""
    ready = [one for one in served if one.state == "READY"]
    return {one.name for one in ready} | {f"{one.name}:{one.version}" for one in ready}
