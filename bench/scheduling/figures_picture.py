"""Draws the paper's four figures from what ``figures`` found: low load left, high load right."""

from collections.abc import Iterator, Mapping
from typing import Any

from serve.obs.svg import Scale, tag, text

WIDTH, LEFT, TOP = 960.0, 70.0, 84.0
PANEL_WIDTH, PANEL_HEIGHT, GAP_X, GAP_Y = 390.0, 150.0, 70.0, 56.0
BAR = 12.0
COLOURS = ("#8a8f98", "#b08800", "#d4a72c", "#c4450c", "#e8825a", "#1f6feb")
#: Figure, what is drawn, and by which ticks; a logarithm unless it is a share.
PANELS = (
    ("Figure 5: violations", ("violation_rate",), (0, 0.25, 0.5, 0.75, 1)),
    (
        "Figure 6: latency ÷ QT, p50, p90, p99",
        ("latency_over_qt_p50", "latency_over_qt_p90", "latency_over_qt_p99"),
        (0.1, 1, 10, 100, 1000),
    ),
    ("Figure 7: mean JCT ÷ QT", ("jct_over_qt_mean",), (0.1, 1, 10, 100)),
    ("Figure 8: mean QUET ÷ QT", ("quet_over_qt_mean",), (0.01, 0.1, 1, 10, 100)),
)


def picture(result: Mapping[str, Any], systems: Mapping[str, str]) -> str:
    """The SVG, from the JSON's content and the systems' names."""
    height = TOP + len(PANELS) * (PANEL_HEIGHT + GAP_Y)
    parts = [tag("rect", width=WIDTH, height=height, fill="white"), *_legend(systems)]
    rows = {(row["load"], row["workload"], row["system"]): row for row in result["rows"]}
    for line, (title, names, ticks) in enumerate(PANELS):
        for column, (load, rho) in enumerate(result["rho"].items()):
            left = LEFT + column * (PANEL_WIDTH + GAP_X)
            top = TOP + line * (PANEL_HEIGHT + GAP_Y)
            share = ticks[0] == 0
            lowest, highest = float(ticks[0]), float(ticks[-1])
            scale = Scale(lowest, highest, top + PANEL_HEIGHT, top, log=not share)
            heading = f"{title}, {load} load (ρ {rho:g})"
            parts.append(tag("g", text(left, top - 10, heading), fill="#24292f", font_weight="600"))
            parts += _grid(left, scale, ticks, share)
            parts += _bars(left, scale, rows, load, names, tuple(systems))
    return (
        tag(
            "svg", *parts, xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH:g} {height:g}", font_family="system-ui, sans-serif",
            font_size=12, fill="#57606a",
        )
        + "\n"
    )  # fmt: skip


def _grid(left: float, scale: Scale, ticks: tuple[float, ...], share: bool) -> Iterator[str]:
    for tick in ticks:
        y = scale(tick)
        # Where late begins is what the eye looks for.
        colour = "#24292f" if tick == 1 and not share else "#d8dee4"
        yield tag("path", d=f"M{left:g} {y:.1f}h{PANEL_WIDTH:g}", stroke=colour)
        yield text(left - 8, y + 4, f"{tick:.0%}" if share else f"{tick:g}", anchor="end")


def _bars(
    left: float,
    scale: Scale,
    rows: Mapping[tuple[str, str, str], Mapping[str, float]],
    load: str,
    names: tuple[str, ...],
    systems: tuple[str, ...],
) -> Iterator[str]:
    workloads = list(dict.fromkeys(workload for _, workload, _ in rows))
    step = PANEL_WIDTH / len(workloads)
    for place, workload in enumerate(workloads):
        first = left + place * step + (step - BAR * len(systems)) / 2
        for number, system in enumerate(systems):
            row, x = rows[load, workload, system], first + number * BAR
            y = scale(row[names[0]])
            yield tag("rect", x=x, y=y, width=BAR - 2, height=max(0.8, scale.start - y),
                      fill=COLOURS[number])  # fmt: skip
            for name in names[1:]:
                mark = scale(row[name])
                yield tag("path", d=f"M{x:.1f} {mark:.1f}h{BAR - 2:g}", stroke=COLOURS[number],
                          stroke_width=2)  # fmt: skip
        yield text(left + (place + 0.5) * step, scale.start + 17, workload.upper(), anchor="middle")


def _legend(systems: Mapping[str, str]) -> Iterator[str]:
    head = text(LEFT, 26, "The paper's figures on this machine, simulated")
    yield tag("g", head, fill="#24292f", font_weight="600")
    x = LEFT
    for colour, name in zip(COLOURS, systems.values(), strict=True):
        yield tag("rect", x=x, y=40, width=10, height=10, fill=colour)
        yield text(x + 15, 49, name)
        x += 40 + 7 * len(name)
