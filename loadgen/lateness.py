"""Late answers during a run: a tab of Locust's web UI."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from flask import request

from loadgen.measure import Sample, distribution

_TAB = "lateness"
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

    def clear(self) -> None:
        """Reset all counts for another run."""
        self._models.clear()

    def add(self, sample: Sample) -> None:
        """Count one request."""
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
    """Add the tab `Lateness` to Locust's web UI."""
    columns = [{"key": key, "title": title} for key, title in _COLUMNS.items()]
    web_ui.template_args["extended_tabs"] = [{"title": "Lateness", "key": _TAB}]
    web_ui.template_args["extended_tables"] = [{"key": _TAB, "structure": columns}]

    @web_ui.app.after_request  # type: ignore[untyped-decorator]
    def extend(response: Any) -> Any:
        if request.path.endswith("/stats/requests") and response.is_json:
            stats = response.get_json() | {
                "extended_stats": [{"key": _TAB, "data": lateness.rows()}]
            }
            response.set_data(web_ui.app.json.dumps(stats))
        return response
