"""The Locust user: one per process, it runs the whole open loop.

Locust's own way, many users that each wait for their answer before they send again, is a closed
loop: a slow server would slow the arrivals down and hide its queue. Here Locust keeps the
statistics and the web UI, and the arrivals are ours.
"""

from loadgen import patched  # noqa: F401  isort: skip

from locust import User, task
from locust.env import Environment
from locust.exception import StopUser

from loadgen.measure import Sample


class RequestFailed(Exception):
    """What Locust's failure statistics show, grouped by text."""


class GraphUser(User):  # type: ignore[misc]
    """Runs the `OpenLoop` found in `environment.open_loop`, None when there is nothing to run."""

    abstract = True
    fixed_count = 1
    #: Show a late answer as a failure, so that Locust's failure plot is the violation plot.
    late_is_failure = False

    @task  # type: ignore[untyped-decorator]
    def drive(self) -> None:
        """The whole run."""
        if self.environment.open_loop is not None:
            self.environment.open_loop.run(self.report)
        raise StopUser

    def report(self, sample: Sample) -> None:
        """Tell Locust of one request."""
        report_sample(self.environment, sample, self.late_is_failure)


def report_sample(environment: Environment, sample: Sample, late_is_failure: bool) -> None:
    """Tell Locust of one request, and of its send lag in a row of its own."""
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
    # Logged beside the totals, which count requests only.
    environment.stats.get("send lag", "generator").log(sample.lag_ns / 1e6, 0)
