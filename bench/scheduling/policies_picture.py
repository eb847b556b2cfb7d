"""Draws what ``policies`` found: the share missed over the load, one panel per workload."""

from typing import Any

WIDTH, PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 960, 250, 190, 60, 64, 60, 70
COLUMNS = 3
GREY = "#8a8f98"
#: System, colour, width, dashes, name.
CURVES = (
    ("default", GREY, 1.5, "", "default: one at a time"),
    ("mps_base", "#b08800", 1.5, "", "mps_base: four at a time"),
    ("bqt+barrier", "#c4450c", 1.5, "", "bqt + barrier (GNNSched)"),
    ("slack+rolling", "#2c8a3d", 1.5, "", "slack + rolling"),
    ("slack+preemptive, 2 lanes a core", "#8ab8f5", 2, "", "the same, 2 lanes a core"),
    ("slack+preemptive", "#1f6feb", 2.5, "", "slack + preemptive"),
    ("bound", "#24292f", 1.5, "4 3", "nobody can do better"),
)
TICKS = (0, 0.25, 0.5, 0.75, 1)


def picture(result: dict[str, Any]) -> str:
    """The SVG, from the JSON's content."""
    missed = {(r["workload"], r["system"], r["rho"]): r["missed"] for r in result["rows"]}
    rhos = sorted({rho for _, _, rho in missed})
    workloads = list(result["goodput"])
    lines = -(-(len(workloads) + 1) // COLUMNS)
    height = TOP + lines * (PANEL_HEIGHT + GAP_Y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#57606a">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 26, "Requests late or refused, by offered load ρ; targets 2 × solo", bold=True),
    ]
    for number, workload in enumerate(workloads):
        left, top = _corner(number)
        parts += _axes(left, top, workload, rhos[-1])
        for system, colour, width, dashes, _ in CURVES:
            points = "L".join(
                f"{left + PANEL_WIDTH * rho / rhos[-1]:.1f} "
                f"{top + PANEL_HEIGHT * (1 - missed[workload, system, rho]):.1f}"
                for rho in rhos
            )
            parts.append(
                f'<path d="M{points}" fill="none" stroke="{colour}" stroke-width="{width}" '
                f'stroke-dasharray="{dashes}" stroke-linejoin="round"/>'
            )
    parts += _legend(*_corner(len(workloads)), result)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _corner(number: int) -> tuple[int, int]:
    line, column = divmod(number, COLUMNS)
    return LEFT + column * (PANEL_WIDTH + GAP_X), TOP + line * (PANEL_HEIGHT + GAP_Y)


def _axes(left: int, top: int, workload: str, last: float) -> list[str]:
    parts = [_text(left, top - 10, workload, bold=True)]
    for share in TICKS:
        y = top + PANEL_HEIGHT * (1 - share)
        parts += [
            f'<path d="M{left} {y:.1f}h{PANEL_WIDTH}" stroke="#d8dee4"/>',
            _text(left - 8, y + 4, f"{share:.0%}", anchor="end"),
        ]
    for tenth in range(0, int(last * 10) + 1, 5):
        x = left + PANEL_WIDTH * tenth / 10 / last
        parts.append(_text(x, top + PANEL_HEIGHT + 18, f"{tenth / 10:g}", anchor="middle"))
    return parts


def _legend(left: int, top: int, result: dict[str, Any]) -> list[str]:
    parts = [_text(left, top - 10, "goodput, mix", bold=True)]
    reach = result["goodput"]["mix"]
    for number, (system, colour, width, dashes, name) in enumerate(CURVES):
        y = top + 16 + 24 * number
        parts += [
            f'<path d="M{left} {y - 4}h26" stroke="{colour}" stroke-width="{width}" '
            f'stroke-dasharray="{dashes}"/>',
            _text(left + 36, y, name),
            _text(left + PANEL_WIDTH, y, f"{reach[system]:.2f}", anchor="end"),
        ]
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600" fill="#24292f"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{text}</text>'
