"""Late answers during a run, in Locust's web UI: a tab, and a line and charts that are live.

Locust's page takes further tabs with tables. A script of our own, which the page loads too, adds
the rest: at the end of the page, where Locust's own script draws nothing.
"""

from collections import deque
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import msgspec
from flask import Response, abort, request

from loadgen.lateness_series import LateSeries
from loadgen.measure import Sample, distribution

_TAB = "lateness"
#: Files that the page loads: package, path and type.
_ASSETS = {
    "lateness.js": ("loadgen", "assets/lateness.js", "text/javascript"),
    "lateness.css": ("loadgen", "assets/lateness.css", "text/css"),
    "uplot.js": ("serve.rest", "assets/live/uplot.js", "text/javascript"),
    "uplot.css": ("serve.rest", "assets/live/uplot.css", "text/css"),
}
_TAGS = (
    '<link rel="stylesheet" href="lateness/assets/uplot.css">'
    '<link rel="stylesheet" href="lateness/assets/lateness.css">'
    '<script src="lateness/assets/uplot.js"></script>'
    '<script src="lateness/assets/lateness.js"></script>'
)
#: Number of latest answers of a model that its percentiles cover.
_RECENT = 2000
_COLUMNS = {
    "model": "Model",
    "requests": "# Requests",
    "answered": "# Answered",
    "late": "# Late at the client",
    "late_share": "Late % at the client",
    "late_by_server": "# Late by the server",
    "late_share_by_server": "Late % by the server",
    "over_target_p50": "Latency ÷ target p50, recent",
    "over_target_p99": "p99, recent",
    "over_target_p999": "p99.9, recent",
}


@dataclass(slots=True)
class _ModelLateness:
    requests: int = 0
    answered: int = 0
    late: int = 0
    late_by_server: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


class Lateness:
    """Counts of answers and late answers by model, cheap to update and to read."""

    def __init__(self) -> None:
        self._models: dict[str, _ModelLateness] = {}
        self.series = LateSeries()

    def clear(self) -> None:
        """Reset all counts for another run."""
        self._models.clear()
        self.series.clear()

    def add(self, sample: Sample) -> None:
        """Count one request, which ended now."""
        self.series.add(sample)
        model = self._models.setdefault(sample.model, _ModelLateness())
        model.requests += 1
        if sample.answered:
            model.answered += 1
            model.late += sample.late
            model.late_by_server += sample.late_by_server
            if (over := sample.over_target) is not None:
                model.recent.append(over)

    def rows(self) -> list[dict[str, object]]:
        """Return one row per model, with the table's columns."""
        return [_row(name, model) for name, model in sorted(self._models.items())]


def _row(name: str, model: _ModelLateness) -> dict[str, object]:
    over = distribution(model.recent)
    answered = model.answered or 1
    return {
        "model": name,
        "requests": model.requests,
        "answered": model.answered,
        "late": model.late,
        "late_share": round(100 * model.late / answered, 2),
        "late_by_server": model.late_by_server,
        "late_share_by_server": round(100 * model.late_by_server / answered, 2),
        "over_target_p50": round(over.p50, 2),
        "over_target_p99": round(over.p99, 2),
        "over_target_p999": round(over.p999, 2),
    }


def show_in(web_ui: Any, lateness: Lateness) -> None:
    """Add the tab `Lateness`, the line and the charts to Locust's web UI."""
    columns = [{"key": key, "title": title} for key, title in _COLUMNS.items()]
    web_ui.template_args["extended_tabs"] = [{"title": "Lateness", "key": _TAB}]
    web_ui.template_args["extended_tables"] = [{"key": _TAB, "structure": columns}]

    base = getattr(web_ui.environment.parsed_options, "web_base_path", None) or ""

    @web_ui.app.route(f"{base}/lateness/points")  # type: ignore[untyped-decorator]
    @web_ui.auth_required_if_enabled  # type: ignore[untyped-decorator]
    def points() -> Response:
        return Response(msgspec.json.encode(lateness.series.points()), mimetype="application/json")

    @web_ui.app.route(f"{base}/lateness/assets/<name>")  # type: ignore[untyped-decorator]
    def asset(name: str) -> Response:
        if name not in _ASSETS:
            abort(404)
        package, path, kind = _ASSETS[name]
        return Response((files(package) / path).read_bytes(), mimetype=kind)

    @web_ui.app.after_request  # type: ignore[untyped-decorator]
    def extend(response: Any) -> Any:
        if request.path.endswith("/stats/requests") and response.is_json:
            stats = response.get_json() | {
                "extended_stats": [{"key": _TAB, "data": lateness.rows()}]
            }
            response.set_data(web_ui.app.json.dumps(stats))
        elif (request.endpoint or "").endswith("index") and response.mimetype == "text/html":
            page = response.get_data(as_text=True)
            response.set_data(page.replace("</body>", f"{_TAGS}</body>"))
        return response
