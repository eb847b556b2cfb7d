"""The gateway's own metrics, which it adds to those of the main process."""

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge

from serve.obs.exposition import PLAIN, exposed

#: Reasons of `gnnserve_rest_refused_total`; each is there from the start, with count 0.
BODY_SIZE = "body_size"
NO_BODY = "no_body"
NO_REQUEST = "no_request"
HELD_BYTES = "held_bytes"
CONNECTIONS = "connections"
SLOW_READER = "slow_reader"
CROSS_SITE = "cross_site"
_REASONS = BODY_SIZE, NO_BODY, NO_REQUEST, HELD_BYTES, CONNECTIONS, SLOW_READER, CROSS_SITE


class Counts:
    """Counters of requests and refusals since the gateway's start."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "gnnserve_rest_requests",
            "Answers of the HTTP port, by status; 499: the client went away",
            ("status",),
            registry=self._registry,
        )
        self._refused = Counter(
            "gnnserve_rest_refused",
            "Requests and connections that the HTTP port refused or cut off",
            ("reason",),
            registry=self._registry,
        )
        for reason in _REASONS:
            self._refused.labels(reason)
        self.connections = Gauge(
            "gnnserve_rest_connections", "Open HTTP connections", registry=self._registry
        )
        self.held_bytes = Gauge(
            "gnnserve_rest_held_bytes",
            "Bytes of bodies and answers that the gateway holds",
            registry=self._registry,
        )

    def answered(self, status: int) -> None:
        """Count an answer."""
        self._requests.labels(str(status)).inc()

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self._refused.labels(reason).inc()

    def text(self, content_type: str = PLAIN) -> bytes:
        """Return the metrics in the form of a content type of ``exposition``."""
        return exposed(self._registry, content_type)
