"""Draw docs/policies.svg and docs/paper.svg from the results of ``policies`` and ``figures``."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.kit.drawing import DARK, GREY, heading, path, rules, sheet
from serve.obs.svg import Scale, tag, text

WIDTH = 960.0
#: System, colour, width, dashes, name.
CURVES = (
    ("default", GREY, 1.5, "", "default: one at a time"),
    ("mps_base", "#b08800", 1.5, "", "mps_base: four at a time"),
    ("bqt+barrier", "#c4450c", 1.5, "", "bqt + barrier (GNNSched)"),
    ("slack+rolling", "#2c8a3d", 1.5, "", "slack + rolling"),
    ("slack+preemptive, 2 lanes a core", "#8ab8f5", 2, "", "the same, 2 lanes a core"),
    ("slack+preemptive", "#1f6feb", 2.5, "", "slack + preemptive"),
    ("bound", DARK, 1.5, "4 3", "lower bound"),
)
BARS = (GREY, "#b08800", "#d4a72c", "#c4450c", "#e8825a", "#1f6feb")
BAR = 12.0
#: Figure, quantities, ticks; logarithmic unless it is a share.
PANELS = (
    ("Figure 5: violations", ("violation_rate",), (0, 0.25, 0.5, 0.75, 1)),
    (
        "Figure 6: latency ÷ target, p50, p90, p99",
        ("latency_over_qt_p50", "latency_over_qt_p90", "latency_over_qt_p99"),
        (0.1, 1, 10, 100, 1000),
    ),
    ("Figure 7: mean JCT ÷ target", ("jct_over_qt_mean",), (0.1, 1, 10, 100)),
    ("Figure 8: mean QUET ÷ target", ("quet_over_qt_mean",), (0.01, 0.1, 1, 10, 100)),
)


def policies_picture(result: Mapping[str, Any]) -> str:
    """Return the share missed over the load, a panel for each workload."""
    rows = {(row["workload"], row["system"]): row for row in result["rows"]}
    workloads = list(dict.fromkeys(workload for workload, _ in rows))
    width, height = 250.0, 190.0
    lines = -(-(len(workloads) + 1) // 3)

    def corner(number: int) -> tuple[float, float]:
        return 60 + number % 3 * (width + 60), 64 + number // 3 * (height + 70)

    parts = [heading(60, 26, "Requests late or refused, by offered load ρ; targets 2 × solo time")]
    for number, workload in enumerate(workloads):
        left, top = corner(number)
        across = Scale(0, 1.5, left, left + width)
        up = Scale(0, 1, top + height, top)
        parts.append(heading(left, top - 10, workload))
        parts += rules(left, width, [(up(s), f"{s:.0%}") for s in (0, 0.25, 0.5, 0.75, 1)])
        parts += [
            text(across(rho), top + height + 18, f"{rho:g}", anchor="middle")
            for rho in (0, 0.5, 1, 1.5)
        ]
        for system, colour, stroke, dashes, _ in CURVES:
            missed = rows[workload, system]["missed"]
            points = "L".join(f"{across(float(r)):.1f} {up(s):.1f}" for r, s in missed.items())
            more = {"stroke_dasharray": dashes or None, "stroke_linejoin": "round"}
            parts.append(path(f"M{points}", colour, stroke, **more))
    left, top = corner(len(workloads))
    parts.append(heading(left, top - 10, "goodput, mix"))
    for number, (system, colour, stroke, dashes, name) in enumerate(CURVES):
        y = top + 16 + 24 * number
        parts += [
            path(f"M{left:g} {y - 4:g}h26", colour, stroke, stroke_dasharray=dashes or None),
            text(left + 36, y, name),
            text(left + width, y, f"{rows['mix', system]['goodput']:.2f}", anchor="end"),
        ]
    return sheet(WIDTH, 64 + lines * (height + 70), parts)


def figures_picture(result: Mapping[str, Any], systems: Mapping[str, str]) -> str:
    """Return the paper's four figures, the low load left and the high load right."""
    width, height, top_gap = 390.0, 150.0, 84.0
    parts = [heading(70, 26, "The paper's figures on this machine, simulated")]
    x = 70.0
    for colour, name in zip(BARS, systems.values(), strict=True):
        parts += [tag("rect", x=x, y=40, width=10, height=10, fill=colour), text(x + 15, 49, name)]
        x += 40 + 7 * len(name)
    for line, (title, names, ticks) in enumerate(PANELS):
        for column, (load, rho) in enumerate(result["rho"].items()):
            left, top = 70 + column * (width + 70), top_gap + line * (height + 56)
            share = ticks[0] == 0
            scale = Scale(ticks[0], ticks[-1], top + height, top, log=not share)
            parts.append(heading(left, top - 10, f"{title}, {load} load (ρ {rho:g})"))
            marks = [(scale(tick), f"{tick:.0%}" if share else f"{tick:g}") for tick in ticks]
            parts += rules(left, width, marks)
            if not share:  # where late begins
                parts.append(path(f"M{left:g} {scale(1):.1f}h{width:g}", DARK))
            rows = [row for row in result["rows"] if row["load"] == load]
            parts += _bars(left, width, scale, rows, names, tuple(systems))
    return sheet(WIDTH, top_gap + len(PANELS) * (height + 56), parts)


def _bars(
    left: float,
    width: float,
    scale: Scale,
    rows: list[Mapping[str, Any]],
    names: tuple[str, ...],
    systems: tuple[str, ...],
) -> Iterator[str]:
    """Yield a group of bars for each workload; further quantities are marks above the bars."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    step = width / len(workloads)
    for row in rows:
        number = systems.index(row["system"])
        place = workloads.index(row["workload"])
        x = left + place * step + (step - BAR * len(systems)) / 2 + number * BAR
        y, colour = scale(row[names[0]]), BARS[number]
        yield tag("rect", x=x, y=y, width=BAR - 2, height=max(0.8, scale.start - y), fill=colour)
        for name in names[1:]:
            yield path(f"M{x:.1f} {scale(row[name]):.1f}h{BAR - 2:g}", colour, 2)
    for place, workload in enumerate(workloads):
        middle = left + (place + 0.5) * step
        yield text(middle, scale.start + 17, workload.upper(), anchor="middle")
