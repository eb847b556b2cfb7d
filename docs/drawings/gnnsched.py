"""The result of ``bench.papers.gnnsched``, laid out as the paper's Figures 5 to 8."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from docs.drawings.frame import DARK, GREY, heading, path, rules, sheet
from serve.svg import Scale, tag, text

#: System, colour, name.
BARS = (
    ("default", GREY, "Default"),
    ("mps_base", "#b08800", "MPS-Base"),
    ("mps_aggr", "#e3b341", "MPS-Aggr"),
    ("sqtf", "#c4450c", "GNNSched, SQTF"),
    ("bqt", "#f0883e", "GNNSched, BQT"),
    ("gnnserve", "#1f6feb", "gnnserve"),
)
DEVICES = {
    "cores": "two cores of this machine",
    "v100": "a V100 by its published share",
    "implied": "the device that the paper's figures imply",
    "gpu": "the GPU measured",
}
PANEL, GAP, HEIGHT = 208.0, 44.0, 110.0
LEFT = 56.0
_LEAST, _MOST = 0.01, 100.0


def gnnsched_picture(result: Mapping[str, Any]) -> str:
    """Return a row of panels for each device and load, a panel for each figure."""
    by_case: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        by_case.setdefault((row["device"], row["load"]), []).append(row)
    parts = [
        heading(LEFT, 26, "GNNSched's Figures 5 to 8, simulated; triangles: the paper's worst")
    ]
    x = LEFT
    for _, colour, name in BARS:
        parts += [tag("rect", x=x, y=38, width=10, height=10, fill=colour), text(x + 15, 47, name)]
        x += 30 + 7.2 * len(name)
    top = 96.0
    for (device, load), rows in by_case.items():
        case = f"{DEVICES[device]}, {load} load, ρ {rows[0]['rho']:.2f}"
        parts.append(heading(LEFT, top - 22, case))
        for number, panel in enumerate((_violations, _latency, _mean("jct"), _mean("quet"))):
            left = LEFT + number * (PANEL + GAP)
            parts += panel(rows, left, top, result["paper_worst"] if load == "high" else {})
        top += HEIGHT + 74
    return sheet(LEFT + 4 * (PANEL + GAP), top - 20, parts)


def _queues(rows: Sequence[Mapping[str, Any]], left: float, top: float) -> Iterator[Any]:
    """Yield (row, x of its bar, its width, its colour), and name the queues below."""
    queues = list(dict.fromkeys(row["queue"] for row in rows))
    group = PANEL / len(queues)
    width = (group - 8) / len(BARS)
    colours = {system: (number, colour) for number, (system, colour, _) in enumerate(BARS)}
    for row in rows:
        number, colour = colours[row["system"]]
        yield row, left + queues.index(row["queue"]) * group + 4 + number * width, width, colour


def _names(rows: Sequence[Mapping[str, Any]], left: float, top: float) -> Iterator[str]:
    queues = list(dict.fromkeys(row["queue"] for row in rows))
    group = PANEL / len(queues)
    for number, queue in enumerate(queues):
        yield text(left + (number + 0.5) * group, top + HEIGHT + 15, queue, anchor="middle")


def _violations(
    rows: Sequence[Mapping[str, Any]], left: float, top: float, paper: Mapping[str, float]
) -> Iterator[str]:
    up = Scale(0, 1, top + HEIGHT, top)
    yield text(left, top - 6, "late or refused")
    yield from rules(left, PANEL, [(up(share), f"{share:.0%}") for share in (0, 0.5, 1)])
    for row, x, width, colour in _queues(rows, left, top):
        y = up(row["violation_rate"])
        yield tag("rect", x=x, y=y, width=width - 0.5, height=top + HEIGHT - y, fill=colour)
    for system, colour, _ in BARS:
        if system in paper:
            x, y = left + PANEL, up(paper[system])
            yield tag("path", d=f"M{x:g} {y:.1f}l8 -4v8z", fill=colour)
    yield from _names(rows, left, top)


def _latency(
    rows: Sequence[Mapping[str, Any]], left: float, top: float, paper: Mapping[str, float]
) -> Iterator[str]:
    """Yield bars from the median to the 99th percentile, with a mark at the 90th."""
    yield text(left, top - 6, "latency ÷ QT: p50, p90, p99")
    yield from _decades(left, top)
    for row, x, width, colour in _queues(rows, left, top):
        low, mark, high = (_log(row[f"latency_over_qt_p{q}"], top) for q in (50, 90, 99))
        yield tag("rect", x=x, y=high, width=width - 0.5, height=max(1.0, low - high), fill=colour)
        yield path(f"M{x:.1f} {mark:.1f}h{width - 0.5:.1f}", DARK, 1)
    yield from _names(rows, left, top)


def _mean(name: str) -> Any:
    titles = {"jct": "mean JCT ÷ QT", "quet": "mean time queued ÷ QT"}

    def panel(
        rows: Sequence[Mapping[str, Any]], left: float, top: float, paper: Mapping[str, float]
    ) -> Iterator[str]:
        yield text(left, top - 6, titles[name])
        yield from _decades(left, top)
        for row, x, width, colour in _queues(rows, left, top):
            y = _log(row[f"{name}_over_qt_mean"], top)
            yield tag("rect", x=x, y=y, width=width - 0.5, height=top + HEIGHT - y, fill=colour)
        yield from _names(rows, left, top)

    return panel


def _log(value: float, top: float) -> float:
    """Return where a ratio stands on the logarithmic scale."""
    within = min(_MOST, max(_LEAST, value))
    return Scale(math.log10(_LEAST), math.log10(_MOST), top + HEIGHT, top)(math.log10(within))


def _decades(left: float, top: float) -> Iterator[str]:
    yield from rules(left, PANEL, [(_log(10.0**e, top), f"{10.0**e:g}") for e in range(-2, 3)])
    y = _log(1.0, top)
    yield path(f"M{left:g} {y:.1f}h{PANEL:g}", DARK, 0.8, stroke_dasharray="3 3")
