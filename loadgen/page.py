"""A run as one HTML file, without network or libraries, also for phones and dark mode."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from loadgen.measure import Distribution, LoadSummary, Sample
from serve.errors import ConfigError
from serve.page_parts import document, figure, table
from serve.quantiles import quantiles
from serve.svg import Canvas, Scale, count_label, doubling_ticks, linear_ticks, number, tag, text

_CANVAS = Canvas(560, 300, left=60)
#: Parts of the run's length that the pictures over time have at most.
_MOST_PARTS = 60
#: Points of the curve of percentiles: shares of answers that are slower.
_BEYOND = [10 ** (-step / 20) for step in range(81)]
#: … of them, those that the curve tells.
_TOLD = (0.5, 0.25, 0.1, 0.05, 0.01, 0.005, 0.001, 0.0005, 0.0001)
_NINES = ("0 %", "90 %", "99 %", "99.9 %", "99.99 %")
#: Answers that the picture of each answer has at most, in time and late.
_DOT_MARKS = 4000
_STYLE = """
path.rate { stroke: var(--run); stroke-width: 1.8; }
circle.at { --c: var(--run); }
.warning { margin-bottom: 12px; }
path.curve { stroke: var(--run); stroke-width: 2; }
circle.one { fill: var(--run); opacity: .35; }
circle.one.late { fill: var(--bad); opacity: .8; }
"""


def write_page(path: Path, summary: LoadSummary, samples: Sequence[Sample]) -> None:
    """Write the page of a run; raises ConfigError when the file cannot be written."""
    try:
        path.write_text(page(summary, samples), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {path}: {error.strerror}") from None


def page(summary: LoadSummary, samples: Sequence[Sample]) -> str:
    """Return the page of a run."""
    header = summary.trace
    low, high = summary.violation_interval
    made = datetime.now(UTC)
    load = (
        f"{header.in_flight} in flight"
        if header.in_flight
        else f"{header.rate_hz:.4g} requests a second"
    )
    facts = [
        load + (f", rate profile {header.profile}" if header.profile else ""),
        f"{header.arrivals} arrivals" if not header.in_flight else "closed loop",
        f"{summary.requests:,} of {summary.scheduled:,} requests sent in {summary.elapsed_s:.1f} s",
        f"to {summary.target}",
    ]
    verdict = (
        f"<b>{summary.violation_rate:.2%}</b> of {summary.answered:,} answers were late at the "
        f"client, 95 % interval {low:.2%} to {high:.2%}; by the server's clock "
        f"{summary.violations_by_server / max(1, summary.answered):.2%}. "
        f"{summary.missed_rate:.2%} of the requests had no answer in time."
    )
    figures = [
        _figure(
            "Latency ÷ target by percentile",
            "At the client. Above the line at 1 is late.",
            _percentiles(samples),
        ),
        _figure(
            "Each answer",
            "By when its request was due. Above the line at 1 is late.",
            _dots(samples),
        ),
        _figure("Requests a second", "By when they were due.", _rates(samples)),
        _figure("Share of late answers", "By when they were due.", _late_shares(samples)),
    ]
    body = "".join(
        [
            f"<h1>Load test: {escape(header.workload)}</h1>",
            f'<div class="facts">{"".join(f"<span>{escape(one)}</span>" for one in facts)}</div>',
            f'<p class="verdict">{verdict}</p>',
            "".join(f'<p class="bad warning">{escape(one)}</p>' for one in summary.warnings),
            f'<div class="grid">{"".join(figures)}',
            _times(summary),
            _models(summary),
            _failures(summary) if summary.messages else "",
            "</div>",
            f'<footer>Made on {made:%Y-%m-%d at %H:%M:%S} UTC<span id="zone"></span>. '
            "Latencies count from when a request "
            f"was due to the answer at the client. The generator used {summary.generator_cpu:.0%} "
            "of a core.</footer>",
        ]
    )
    return document(f"{summary.violation_rate:.2%} late · gnnserve load", body, _STYLE)


def _figure(title: str, caption: str, picture: str) -> str:
    return figure(title, caption, picture, empty="No answer had a target.")


# -- pictures --------------------------------------------------------------------------------------


def _percentiles(samples: Sequence[Sample]) -> str:
    over = sorted(one for sample in samples if (one := _over(sample)) is not None)
    if not over:
        return ""
    beyond = [share for share in _BEYOND if share * len(over) >= 1]
    values = quantiles(over, [1 - share for share in beyond])
    y = _ratio_scale(over[0], over[-1])
    # A decade towards 100 % has a fixed width.
    x = Scale(1, max(10.0, 1 / beyond[-1]), _CANVAS.left, _CANVAS.x_end, log=True)
    ticks = [(10.0**power, label) for power, label in enumerate(_NINES)]
    points = [(x(1 / share), y(value)) for share, value in zip(beyond, values, strict=True)]
    told = [share for share in _TOLD if share >= beyond[-1]]
    return _CANVAS.svg(
        "Latency divided by target, by percentile",
        _CANVAS.y_axis(y, _ratio_ticks(y)),
        _CANVAS.x_axis(x, [tick for tick in ticks if tick[0] <= x.hi], "percentile of the answers"),
        _target(y),
        tag("path", d=_line(points), cls="curve"),
        *(
            tag("circle", cx=x(1 / share), cy=y(value), r=3.5, cls="at",
                data_t=f"p{100 - 100 * share:.6g}\n{value:,.2f} × target")
            for share, value in zip(told, quantiles(over, [1 - one for one in told]), strict=True)
        ),
    )  # fmt: skip


def _dots(samples: Sequence[Sample]) -> str:
    found = [(one.due_ns / 1e9, over) for one in samples if (over := _over(one)) is not None]
    if not found:
        return ""
    # As many as a picture can show, of late answers and of the others.
    late, kept = [one for one in found if one[1] > 1], [one for one in found if one[1] <= 1]
    shown = [one for some in (kept, late) for one in some[:: max(1, -(-len(some) // _DOT_MARKS))]]
    x, x_axis = _time_axis(samples)
    y = _ratio_scale(min(one[1] for one in found), max(one[1] for one in found))
    marks = "".join(
        tag("circle", cx=x(at_s), cy=y(over), r=2.2, cls="one late" if over > 1 else "one")
        for at_s, over in shown
    )
    axes = _CANVAS.y_axis(y, _ratio_ticks(y)) + x_axis
    return _CANVAS.svg("Each answer by when it was due", axes, marks, _target(y))


def _rates(samples: Sequence[Sample]) -> str:
    width_s, parts = _parts(samples)
    rates = [len(part) / width_s for part in parts]
    x, x_axis = _time_axis(samples)
    y = Scale(0, max(rates, default=0) * 1.1 or 1, _CANVAS.y_end, _CANVAS.top)
    points = [(x((place + 0.5) * width_s), y(rate)) for place, rate in enumerate(rates)]
    ticks = linear_ticks(0, y.hi, 5, count_label)
    return _CANVAS.svg(
        "Requests a second over time",
        _CANVAS.y_axis(y, ticks),
        x_axis,
        tag("path", d=_line(points), cls="rate"),
        *(
            tag("circle", cx=at, cy=height, r=2.5, cls="at",
                data_t=f"{_span(place, width_s)}\n{rate:,.4g} requests a second")
            for place, (rate, (at, height)) in enumerate(zip(rates, points, strict=True))
        ),
    )  # fmt: skip


def _late_shares(samples: Sequence[Sample]) -> str:
    width_s, parts = _parts(samples)
    shares = [
        sum(one.late for one in part) / max(1, sum(one.answered for one in part)) for part in parts
    ]
    x, x_axis = _time_axis(samples)
    y = Scale(0, max(0.01, *shares), _CANVAS.y_end, _CANVAS.top)
    bars = (
        tag("rect", x=x(place * width_s) + 0.5, y=y(share), cls="late",
            width=max(x((place + 1) * width_s) - x(place * width_s) - 1, 0.5),
            height=y(0) - y(share),
            data_t=f"{_span(place, width_s)}\n{share:.2%} of the answers late")
        for place, share in enumerate(shares)
        if share
    )  # fmt: skip
    return _CANVAS.svg(
        "Share of late answers over time",
        _CANVAS.y_axis(y, linear_ticks(0, y.hi, 5, _percent_label)),
        x_axis,
        *bars,
    )


def _span(place: int, width_s: float) -> str:
    """Return the seconds that a part of the run covers."""
    return f"{place * width_s:.4g} to {(place + 1) * width_s:.4g} s"


def _time_axis(samples: Sequence[Sample]) -> tuple[Scale, str]:
    end_s = max((one.due_ns for one in samples), default=0) / 1e9 or 1.0
    x = Scale(0, end_s, _CANVAS.left, _CANVAS.x_end)
    ticks = linear_ticks(0, end_s, 6, lambda value: f"{value:g}")
    return x, _CANVAS.x_axis(x, ticks, "seconds since the start")


def _parts(samples: Sequence[Sample]) -> tuple[float, list[list[Sample]]]:
    """Return the length of a part of the run in seconds, and the requests due in each."""
    end_s = max((one.due_ns for one in samples), default=0) / 1e9 or 1.0
    count = max(1, min(_MOST_PARTS, len(samples) // 5))
    parts: list[list[Sample]] = [[] for _ in range(count)]
    for one in samples:
        parts[min(count - 1, int(one.due_ns / 1e9 / end_s * count))].append(one)
    return end_s / count, parts


def _ratio_scale(least: float, most: float) -> Scale:
    """Return a logarithmic scale of latency ÷ target that has 1 on it."""
    low, high = 0.5, 2.0
    while low > max(least, 1e-3):
        low /= 2
    while high < most:
        high *= 2
    return Scale(low, high, _CANVAS.y_end, _CANVAS.top, log=True)


def _ratio_ticks(y: Scale) -> list[tuple[float, str]]:
    factor = 2 if y.hi / y.lo <= 2**7 else 8
    return doubling_ticks(
        y.lo, y.hi, factor, lambda value: count_label(value) if value >= 1 else f"{value:.2g}"
    )


def _target(y: Scale) -> str:
    at = y(1)
    line = tag(
        "path", d=f"M{number(_CANVAS.left)} {number(at)}H{number(_CANVAS.x_end)}", cls="target"
    )
    return line + text(_CANVAS.x_end, at - 5, "target", "tick halo", "end")


def _line(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def _percent_label(share: float) -> str:
    return f"{100 * share:.3g} %"


def _over(sample: Sample) -> float | None:
    return sample.over_target if sample.answered else None


# -- tables ----------------------------------------------------------------------------------------


def _times(summary: LoadSummary) -> str:
    rows = [
        [name, *(f"{value:,.2f}" for value in _values(values))]
        for name, values in (
            ("latency, ms", summary.latency_ms),
            ("latency ÷ target", summary.latency_over_qt),
            ("send lag, ms", summary.send_lag_ms),
        )
    ]
    head = "time/mean/p50/p90/p99/p99.9/max"
    return table("Times", "", rows, head, "_nnnnnn", wide=True)


def _values(found: Distribution) -> tuple[float, ...]:
    return found.mean, found.p50, found.p90, found.p99, found.p999, found.max


def _models(summary: LoadSummary) -> str:
    rows = [
        [
            escape(name),
            f"{one.requests:,}",
            f"{one.answered:,}",
            f"{one.violations / one.answered:.2%}" if one.answered else "–",
            f"{one.latency_ms.p50:,.2f}",
            f"{one.latency_ms.p99:,.2f}",
            f"{one.latency_over_qt.p99:,.2f}",
        ]
        for name, one in summary.by_model.items()
    ]
    head = "model/requests/answered/late/p50, ms/p99, ms/p99 ÷ target"
    return table("By model", "", rows, head, "_nnnnnn", "No request was sent.", wide=True)


def _failures(summary: LoadSummary) -> str:
    rows = [
        [escape(status), f"{summary.by_status[status]:,}", escape(message)]
        for status, message in summary.messages.items()
    ]
    head = "status/requests/for example"
    return table("Requests without an answer", "", rows, head, "_n_", wide=True)
