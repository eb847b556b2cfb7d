"""Figure of the report: reserved against measured memory."""

import math

import numpy as np

from serve.obs.frame import Column, Frame, ratio
from serve.obs.plots import HALF
from serve.obs.svg import Canvas, Scale, doubling_ticks, number, tag, text
from serve.units import format_bytes

#: Most points drawn; more are thinned out evenly, keeping the extreme ones.
MAX_POINTS = 2500


def memory_plot(launched: Frame) -> str:
    """Draw measured peak against reservation on logarithmic axes, and a histogram of their ratio.

    Points above the diagonal, and bars right of 1, are runs that used more than was reserved.
    """
    canvas = Canvas(HALF, 350, left=74, right=32, top=26, bottom=144)
    known = launched.where(launched["pmc_measured_bytes"] > 0)
    excess = ratio(known["pmc_measured_bytes"], np.maximum(known["reserve_bytes"], 1))
    spread = _excess(canvas, excess)
    known = known.where(_thin(excess))
    took, held = known["pmc_measured_bytes"], np.maximum(known["reserve_bytes"], 1)
    lo = 4.0 ** math.floor(math.log(min(took.min(), held.min()), 4))
    hi = 4.0 ** math.ceil(math.log(max(took.max(), held.max()) * 1.001, 4))
    x = Scale(lo, hi, canvas.left, canvas.x_end, log=True)
    y = Scale(lo, hi, canvas.y_end, canvas.top, log=True)
    colour = {model: f"m{i % 8}" for i, model in enumerate(sorted(set(known["model"].tolist())))}
    points = (
        tag(
            "circle",
            cx=x(held[i]),
            cy=y(took[i]),
            r=2.6 if took[i] <= held[i] else 4,
            cls=colour[known["model"][i]] if took[i] <= held[i] else "under",
            data_t=f"{known['model'][i]}  {known['num_nodes'][i]:,} nodes,"
            f" {known['num_edges'][i]:,} edges\nreserved {format_bytes(held[i])},"
            f" measured {format_bytes(took[i])}",
        )
        for i in range(len(known))
    )
    every = 4.0 ** max(1, math.ceil(math.log(hi / lo, 4) / 5))
    ticks = doubling_ticks(lo, hi, every, format_bytes)
    corner = f"M{number(x(lo))} {number(y(lo))}L{number(x(hi))} {number(y(hi))}"
    return canvas.svg(
        "Reserved against measured memory",
        canvas.y_axis(y, ticks),
        tag("path", d=f"{corner}H{number(x(lo))}Z", cls="forbidden"),
        tag("path", d=corner, cls="diagonal"),
        text(canvas.left + 10, canvas.top + 18, "more than reserved", "tick"),
        *points,
        canvas.x_axis(x, ticks, "reserved"),
        text(canvas.left - 7, canvas.top - 12, "measured", "title", "end"),
        spread,
    )


def _excess(canvas: Canvas, excess: Column) -> str:
    """Draw the lower panel, a histogram of measured ÷ reserved around 1."""
    base, top = canvas.height - 40, canvas.height - 92
    edges = np.linspace(0.5, 1.2, 71)
    counts = np.histogram(np.clip(excess, 0.5, 1.2 - 1e-9), edges)[0]
    x = Scale(0.5, 1.2, canvas.left, canvas.x_end)
    y = Scale(0, float(counts.max()), base, top)
    bars = (
        tag(
            "rect",
            x=x(left) + 0.3,
            y=y(count),
            width=x(right) - x(left) - 0.6,
            height=base - y(count),
            cls="late" if left > 0.999 else "held",
            data_t=f"measured {left:.0%} to {right:.0%} of the reservation\n{count:,} runs",
        )
        for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True)
        if count
    )
    ticks = [
        (0.5, "≤ 0.5"),
        *((v, f"{v:g}") for v in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)),
        (1.2, "≥ 1.2"),
    ]
    line = tag("path", d=f"M{number(x(1))} {number(base)}V{number(top - 6)}", cls="target")
    return "".join([*bars, line, canvas.x_axis(x, ticks, "measured ÷ reserved", base)])


def _thin(excess: Column) -> Column:
    """Return the positions of at most MAX_POINTS rows, those with the largest `excess` included."""
    if len(excess) <= MAX_POINTS:
        return np.arange(len(excess))
    extreme = np.argsort(-excess, kind="stable")[: MAX_POINTS // 5]
    even = np.linspace(0, len(excess) - 1, MAX_POINTS - len(extreme)).astype(np.int64)
    return np.union1d(even, extreme)
