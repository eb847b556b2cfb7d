"""Figure of the report: reserved against measured memory."""

import math

import numpy as np

from serve.obs.frame import Column, Frame
from serve.obs.plots import HALF
from serve.obs.totals import EXCESS_EDGES
from serve.svg import Canvas, Scale, doubling_ticks, number, tag, text
from serve.units import format_bytes


def memory_plot(known: Frame, excess_counts: Column) -> str:
    """Draw measured peak against reservation on logarithmic axes, and a histogram of their ratio.

    Points above the diagonal, and bars right of 1, are runs that used more than was reserved.

    Args:
        known: Runs to draw as points, whose measured peak is positive.
        excess_counts: Counts of all runs by measured ÷ reserved, between `EXCESS_EDGES`.
    """
    canvas = Canvas(HALF, 350, left=74, right=32, top=26, bottom=144)
    spread = _excess(canvas, excess_counts)
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


def _excess(canvas: Canvas, counts: Column) -> str:
    """Draw the lower panel, a histogram of measured ÷ reserved around 1."""
    base, top = canvas.height - 40, canvas.height - 92
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
        for left, right, count in zip(EXCESS_EDGES[:-1], EXCESS_EDGES[1:], counts, strict=True)
        if count
    )
    ticks = [
        (0.5, "≤ 0.5"),
        *((v, f"{v:g}") for v in (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)),
        (1.2, "≥ 1.2"),
    ]
    line = tag("path", d=f"M{number(x(1))} {number(base)}V{number(top - 6)}", cls="target")
    return "".join([*bars, line, canvas.x_axis(x, ticks, "measured ÷ reserved", base)])
