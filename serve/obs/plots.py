"""Figures of the report: each function returns SVG text.

See ``memory_plot`` and ``timeline`` for two more figures, ``svg`` for drawing and ``html`` for the
page.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from serve.core.rules.cause import CAUSES
from serve.obs import explanations
from serve.obs.frame import STAGES
from serve.obs.intervals import BAR_SECONDS, Intervals
from serve.obs.summary import Summary
from serve.obs.totals import OVER_EDGES, StageSums
from serve.obs.violations import Violation
from serve.svg import (
    Canvas,
    Scale,
    count_ticks,
    doubling_ticks,
    linear_ticks,
    number,
    tag,
    text,
)
from serve.units import format_ms

#: Widths of a figure in half a page and of one across the page.
HALF = 540.0
_WIDE = 1104.0
_FRACTIONS = {0.03125: "1⁄32", 0.0625: "1⁄16", 0.125: "⅛", 0.25: "¼", 0.5: "½"}


def distribution(summary: Summary) -> str:
    """Draw a histogram of latency ÷ QoS target; answers right of 1 are late."""
    canvas = Canvas(HALF, 376, top=34)
    answers, total = summary.answers, summary.all
    least, most = answers.over_range
    lo = 2.0 ** min(max(math.floor(math.log2(max(least, 1e-3))), -5), -2)
    hi = 2.0 ** max(min(math.ceil(math.log2(max(most, 1e-3))), 6), 1)
    shown = (lo * 0.999 < OVER_EDGES) & (hi * 1.001 > OVER_EDGES)
    edges = OVER_EDGES[shown]
    within = np.flatnonzero(shown[:-1] & shown[1:])
    counts = answers.over_counts[within]
    counts[0] += answers.over_counts[: within[0]].sum()
    counts[-1] += answers.over_counts[within[-1] + 1 :].sum()
    answered = total.over.count
    x = Scale(lo, hi, canvas.left, canvas.x_end, log=True)
    y = Scale(0, float(counts.max()) * 1.04, canvas.y_end, canvas.top)
    bars = (
        tag(
            "rect",
            x=x(left) + 0.5,
            y=y(count),
            width=x(right) - x(left) - 1,
            height=canvas.y_end - y(count),
            cls="late" if left > 0.999 else "kept",
            data_t=f"{left:.2f} to {right:.2f} × target\n{count:,} answers"
            f" ({count / answered:.1%})",
        )
        for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True)
        if count
    )
    late = total.violations / answered
    target = number(x(1))
    marks = [
        tag("path", d=f"M{target} {number(canvas.y_end)}V{canvas.top - 20}", cls="target"),
        text(x(1) - 8, canvas.top - 12, f"{1 - late:.2%} in time", "strong", "end"),
        text(x(1) + 8, canvas.top - 12, f"{late:.2%} late", "strong bad"),
    ]
    shares = (0.5, 0.9, 0.99)
    for row, (share, value) in enumerate(zip(shares, total.over.quantiles(shares), strict=True)):
        at = x(value)
        height = canvas.top + 12 + 15 * row
        line = f"M{number(at)} {number(canvas.y_end)}V{number(height - 9)}"
        before = at > canvas.x_end - 40 or -34 < at - x(1) < 0
        marks += [
            tag("path", d=line, cls="quantile"),
            text(at + (-5 if before else 5), height, f"p{share * 100:g}", "tick halo",
                 "end" if before else None),
        ]  # fmt: skip
    ticks = doubling_ticks(lo, hi, 2, _fraction)
    if most > hi:
        ticks[-1] = (hi, f"≥ {hi:g}")
    return canvas.svg(
        "Latency divided by QoS target",
        canvas.y_axis(y, count_ticks(y.hi, 4)),
        *bars,
        *marks,
        canvas.x_axis(x, ticks, "latency ÷ QoS target"),
    )


def over_time(intervals: Intervals) -> str:
    """Draw requests per interval by outcome, and below them late answers by cause."""
    canvas = Canvas(_WIDE, 330, bottom=44)
    first, width, bars = intervals.start_s, intervals.width_s, intervals.bars
    x = Scale(0, bars, canvas.left, canvas.x_end)
    named = {"kept": "in time", "late": "late", "none": "without a result"}
    causes = {f"c-{cause}": cause for cause in CAUSES}
    split = canvas.top + 150
    panels = (
        (named, "requests", canvas.top + 14, split),
        (causes, "late, by cause", split + 34, canvas.y_end),
    )
    parts: list[str] = []
    for labels, title, top, base in panels:
        stacks = {cls: intervals.counts(cls) for cls in labels}
        total = np.sum(list(stacks.values()), axis=0)
        y = Scale(0, max(float(total.max()), 1.0), base, top)
        parts.append(canvas.y_axis(y, count_ticks(y.hi, 3)))
        parts.append(text(canvas.left, top - 8, f"{title} per {_span(width)}", "strong"))
        below = np.zeros(bars, dtype=np.int64)
        for cls, counts in stacks.items():
            for i in np.flatnonzero(counts).tolist():
                at = _clock(first + i * width, width)
                parts.append(
                    tag(
                        "rect",
                        x=x(i) + 0.5,
                        y=y(below[i] + counts[i]),
                        width=x(i + 1) - x(i) - 1,
                        height=y(below[i]) - y(below[i] + counts[i]),
                        cls=cls,
                        data_t=f"{at} UTC\n{labels[cls]}: {counts[i]:,} of {total[i]:,}",
                    )
                )
            below += counts
        parts.append(tag("path", d=f"M{canvas.left} {number(base)}H{canvas.x_end}", cls="axis"))
    apart = next((s for s in BAR_SECONDS if bars * width / s <= 10), bars * width / 10)
    begin = math.ceil(first / apart - 1e-9) * apart
    marks = (
        begin + i * apart for i in range(math.floor((first + bars * width - begin) / apart) + 1)
    )
    ticks = [((mark - first) / width, _clock(mark, apart)) for mark in marks]
    return canvas.svg(
        "Requests and late answers over time",
        *parts,
        canvas.x_axis(x, ticks, f"arrival, {_day(first)} UTC"),
    )


def stage_shares(stages: dict[str, StageSums]) -> str:
    """Draw the mean share of the latency by stage, for late answers and for those in time."""
    canvas = Canvas(HALF, 200, left=72, right=26, top=8)
    x = Scale(0, 1, canvas.left, canvas.x_end)
    parts: list[str] = []
    for row, (label, group) in enumerate(stages.items()):
        top = canvas.top + row * 50
        parts.append(text(canvas.left - 9, top + 26, label, "tick", "end"))
        if not group.count:
            parts.append(text(canvas.left, top + 26, "none", "tick"))
            continue
        means = group.means()
        tips = {stage: f"{label}: {share:.1%} of the latency" for stage, share in means.items()}
        parts.append(_stack(x, top, 42, means, tips))
        at = 0.0
        for share in means.values():
            if share >= 0.07:
                parts.append(text(x(at + share / 2), top + 26, f"{share:.0%}", "on", "middle"))
            at += share
    ticks = linear_ticks(0, 1, 5, lambda share: f"{share:.0%}")
    return canvas.svg(
        "Mean share of the latency by stage",
        *parts,
        canvas.x_axis(x, ticks, "mean share of latency"),
    )


def worst_stages(worst: Sequence[Violation]) -> str:
    """Draw the stages of the latest answers, in multiples of their target."""
    canvas = Canvas(HALF, 52 + 22.0 * len(worst), left=162, top=14)
    x = Scale(0, max(v.latency_over_qt for v in worst) * 1.02, canvas.left, canvas.x_end)
    ticks = linear_ticks(0, x.hi, 5, lambda value: f"{value:g}×")
    parts: list[str] = []
    for row, late in enumerate(worst):
        top = canvas.top + row * 22
        shares = {stage: ms / late.qos_target_ms for stage, ms in late.stages_ms.items()}
        head = (
            f"{late.request_uid}  {late.model}\n{late.latency_over_qt:.2f} × target: {late.cause}"
        )
        tips = {stage: f"{head}\n{format_ms(ms)}" for stage, ms in late.stages_ms.items()}
        parts.append(text(canvas.left - 9, top + 13, f"{late.request_uid[-12:]} {late.model[:7]}",
                          "tick mono", "end"))  # fmt: skip
        parts.append(_stack(x, top, 17, shares, tips))
    target = f"M{number(x(1))} {number(canvas.y_end)}V{canvas.top - 12}"
    return canvas.svg(
        "Stages of the answers furthest beyond their target",
        *parts,
        tag("path", d=target, cls="target"),
        canvas.x_axis(x, ticks, "latency ÷ QoS target"),
    )


def _stack(
    x: Scale, top: float, height: float, parts: dict[str, float], tips: dict[str, str]
) -> str:
    """Draw a horizontal bar of stages end to end."""
    rects: list[str] = []
    at = 0.0
    for stage in STAGES:
        if (width := x(at + parts[stage]) - x(at)) > 0.05:
            tip = f"{explanations.STAGES[stage]}\n{tips[stage]}"
            rects.append(
                tag(
                    "rect", x=x(at), y=top, width=width, height=height, cls=f"s-{stage}", data_t=tip
                )
            )
        at += parts[stage]
    return "".join(rects)


def _fraction(value: float) -> str:
    return _FRACTIONS.get(value, f"{value:g}")


def _span(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:g} ms"
    return f"{seconds:g} s" if seconds < 60 else f"{seconds / 60:g} min"


def _clock(unix_s: float, step: float) -> str:
    """Format the time of day to the precision that steps of `step` seconds need."""
    moment = datetime.fromtimestamp(round(unix_s, 3), UTC)
    if step < 1:
        return f"{moment:%H:%M:%S}.{moment.microsecond // 10_000:02d}"
    if step < 60:
        return f"{moment:%H:%M:%S}"
    return f"{moment:%H:%M}" if step < 21600 else f"{moment.day} {moment:%b %H:%M}"


def _day(unix_s: float) -> str:
    moment = datetime.fromtimestamp(unix_s, UTC)
    return f"{moment.day} {moment:%B %Y}"
