"""The Locust user, of which one in each process runs the whole open loop.

Locust's usual many users, each of which waits for its answer before it sends again, form a closed
loop: a slow server slows the arrivals and so hides its queue. Here Locust provides statistics and
the web UI, and ``open_loop`` the arrivals.
"""

from loadgen import patched  # noqa: F401  isort: skip

from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from loadgen.measure import Sample


class RequestFailed(Exception):
    """Failure that Locust's statistics show, grouped by its text."""


class Load(User):  # type: ignore[misc]
    """Runs the loop in `environment.open_loop`, or nothing when that is None.

    `environment.on_sample` is called with every request that ended.
    """

    #: Count late answers as failures, so that Locust's plot of failures shows violations.
    late_is_failure = False

    @task  # type: ignore[untyped-decorator]
    def drive(self) -> None:
        """Run the open loop to its end."""
        if self.environment.open_loop is not None:
            self.environment.open_loop.drive(self.report)
        raise StopUser

    def report(self, sample: Sample) -> None:
        """Add one request to Locust's statistics."""
        report_sample(self.environment, sample, self.late_is_failure)
        self.environment.on_sample(sample)


def report_sample(environment: Environment, sample: Sample, late_is_failure: bool) -> None:
    """Add one request, and its send lag in a row of its own, to Locust's statistics."""
    failure = None if sample.answered else RequestFailed(sample.status)
    if late_is_failure and sample.late:
        failure = RequestFailed("answered after its QoS target")
    environment.events.request.fire(
        request_type="grpc",
        name=sample.model,
        response_time=sample.latency_ns / 1e6,
        response_length=sample.size_bytes,
        exception=failure,
        context={},
    )
    # `stats.get` and not an event, so that the totals count requests alone.
    environment.stats.get("send lag", "generator").log(sample.lag_ns / 1e6, 0)
