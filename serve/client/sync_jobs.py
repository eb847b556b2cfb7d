"""Training of models for a client for threads, made from ``aio_jobs``."""

from collections.abc import Iterator

from serve.client.facts import JobFacts
from serve.client.sync_connection import Transport
from serve.pb import gnnserve_pb2


class Jobs:
    """The client's methods that train models beside requests."""

    _connection: Transport

    def train(
        self,
        model: str,
        graph: str,
        *,
        epochs: int,
        learning_rate: float = 0.0,
        seed: int = 0,
        fresh: bool = False,
        priority: int = 0,
    ) -> JobFacts:
        """Have the server train a model on one of its graphs, and return the job at once.

        Args:
            model: Name of the model; its weights are published as its next version.
            graph: Graph that the server holds, with labels.
            epochs: Steps over the whole graph.
            learning_rate: Of Adam; 0 for the server's default.
            seed: Of which nodes are learned from, and of all random numbers.
            fresh: Start from new weights, not from those of the version that answers.
            priority: 1 is the most urgent, 0 the default.
        """
        request = gnnserve_pb2.SubmitJobRequest(
            model=model, graph=graph, epochs=epochs, learning_rate=learning_rate, seed=seed,
            fresh=fresh, priority=priority,
        )  # fmt: skip
        found = self._connection.call(self._connection.own.SubmitJob, request, changes=True)
        return JobFacts.of(found.job)

    def jobs(self) -> tuple[JobFacts, ...]:
        """Return all training jobs, oldest first, those that ended lately among them."""
        request = gnnserve_pb2.ListJobsRequest()
        found = self._connection.call(self._connection.own.ListJobs, request)
        return tuple(map(JobFacts.of, found.jobs))

    def watch_job(self, job_id: int) -> Iterator[JobFacts]:
        """Yield a training job as it stands, then whenever it got on, up to its end."""
        request = gnnserve_pb2.WatchJobRequest(job_id=job_id)
        while True:
            found = self._connection.call(self._connection.own.WatchJob, request)
            facts = JobFacts.of(found.job)
            yield facts
            if facts.ended:
                return
            request = gnnserve_pb2.WatchJobRequest(job_id=job_id, seen=found.job)

    def cancel_job(self, job_id: int) -> JobFacts:
        """End a training job, unless it has ended or is published, and return it.

        A job without an end and with a version was published before it could be cancelled.
        """
        request = gnnserve_pb2.CancelJobRequest(job_id=job_id)
        found = self._connection.call(self._connection.own.CancelJob, request, changes=True)
        return JobFacts.of(found.job)
