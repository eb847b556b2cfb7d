"""Clients that wait for training jobs: how many may, and that nobody waits for them."""

import threading
from contextlib import suppress

import grpc
import pytest

from bench.kit.waiting import PATIENCE_S, wait_for
from serve.pb import gnnserve_pb2 as pb
from serve.pb import gnnserve_pb2_grpc
from serve.rpc.thread_pools import MAX_JOB_WATCHERS
from serve.server.training.job_facts import JobStatus


class Training:
    """One job, whose watchers wait until it is cancelled."""

    def __init__(self):
        self.waiting, self.cancelled = 0, threading.Event()
        self._lock = threading.Lock()

    def watch(self, job_id, seen):
        with self._lock:
            self.waiting += 1
        self.cancelled.wait(PATIENCE_S)
        return self._facts("cancelled")

    def cancel(self, job_id):
        self.cancelled.set()
        return self._facts("cancelled")

    def jobs(self):
        return (self._facts("running"),)

    def _facts(self, state):
        return JobStatus(1, "gcn", "community", 3, 1, state, 0.5, 10, 0.0, 0, "", 100)


def test_watchers_are_bounded_and_hold_up_no_other_call(engine, own, target):
    engine.training = training = Training()
    request = pb.WatchJobRequest(job_id=1)
    watching = [own.WatchJob.future(request) for _ in range(MAX_JOB_WATCHERS)]
    wait_for(lambda: training.waiting == MAX_JOB_WATCHERS, "all watchers")
    # On a connection of its own, as the first may have no more calls.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(target, options) as channel:
        other = gnnserve_pb2_grpc.GnnServeStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            other.WatchJob(request)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{MAX_JOB_WATCHERS} watches of training jobs are open" in refused.value.details()
        assert [job.state for job in other.ListJobs(pb.ListJobsRequest()).jobs] == ["running"]
        assert other.CancelJob(pb.CancelJobRequest(job_id=1)).job.state == "cancelled"
        assert {one.result().job.state for one in watching} == {"cancelled"}

        def watched():
            with suppress(grpc.RpcError):
                return other.WatchJob(request).job.state

        # Their places are free again.
        assert wait_for(watched, "a place") == "cancelled"
