"""The two forms in which metrics are given: Prometheus' text format, and OpenMetrics."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open

#: Content types.
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_END = b"# EOF\n"


def wanted_type(accept: str | None) -> str:
    """Return the content type for a request's header `Accept`, as Prometheus' own clients do."""
    return OPEN if accept is not None and "application/openmetrics-text" in accept else PLAIN


def exposed(registry: CollectorRegistry, content_type: str) -> bytes:
    """Return all metrics of a registry in the form of that content type."""
    found: bytes = (generate_open if content_type == OPEN else generate_latest)(registry)
    return found


def before(first: bytes, second: bytes) -> bytes:
    """Return two texts of one form as one; only the last line of OpenMetrics says that it ends."""
    return first.removesuffix(_END) + second
