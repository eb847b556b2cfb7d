"""The result of ``bench.scheduling.policies``."""

from collections.abc import Mapping
from typing import Any

from docs.drawings.frame import DARK, GREY, WIDTH, heading, path, rules, sheet
from serve.svg import Scale, text

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


def policies_picture(result: Mapping[str, Any]) -> str:
    """Return the share missed over the load, a panel for each workload."""
    rows = {(row["workload"], row["system"]): row for row in result["rows"]}
    workloads = list(dict.fromkeys(workload for workload, _ in rows))
    width, height = 250.0, 190.0
    corners = [
        (60 + number % 3 * (width + 60), 64 + number // 3 * (height + 70))
        for number in range(len(workloads) + 1)
    ]
    parts = [heading(60, 26, "Requests late or refused, by offered load ρ; targets 2 × solo time")]
    for workload, (left, top) in zip(workloads, corners, strict=False):
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
    left, top = corners[-1]
    parts.append(heading(left, top - 10, "goodput, mix"))
    for number, (system, colour, stroke, dashes, name) in enumerate(CURVES):
        y = top + 16 + 24 * number
        parts += [
            path(f"M{left:g} {y - 4:g}h26", colour, stroke, stroke_dasharray=dashes or None),
            text(left + 36, y, name),
            text(left + width, y, f"{rows['mix', system]['goodput']:.2f}", anchor="end"),
        ]
    return sheet(WIDTH, top + height + 70, parts)
