"""The result of ``bench.papers.gnnsched_costs``, laid out as the paper's Figures 9 and 10."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from docs.drawings.frame import DARK, GREY, LATE, heading, path, rules, sheet
from serve.svg import Scale, tag, text

OURS, TABLE_2 = "#1f6feb", "#c4450c"
LEFT, PANEL, GAP, HEIGHT = 64.0, 270.0, 48.0, 130.0
#: Errors that the panels of Figure 9 show; those beyond stand at the edge.
_LOWEST, _HIGHEST = -0.6, 0.6
PARTS = (
    ("schedule_permille", "#1f6feb", "scheduling"),
    ("estimate_permille", "#8250df", "estimating"),
    ("insert_permille", GREY, "inserting the buffer"),
)
NAMES = {"sqtf": "SQTF", "bqt": "BQT", "gnnserve": "gnnserve"}
_BAR, _BAR_GAP = 34.0, 26.0


def gnnsched_costs_picture(result: Mapping[str, Any]) -> str:
    """Return a panel of errors for each model, and one of costs for each load."""
    models = list(dict.fromkeys(row["model"] for row in result["accuracy"]))
    parts = [
        heading(LEFT, 26, "GNNSched's Figure 9: estimated ÷ measured peak memory − 1, each dot a "
                          "subgraph"),
        *_key(LEFT, 40, [(OURS, "gnnserve"), (TABLE_2, "the paper's Table 2 × 1.1"),
                         (LATE, f"the paper's claim: within {result['paper_error']:.0%}")]),
    ]  # fmt: skip
    top = 92.0
    for number, model in enumerate(models):
        rows = [row for row in result["accuracy"] if row["model"] == model]
        parts += _errors(model, rows, result["paper_error"], LEFT + number * (PANEL + GAP), top)
    second = top + HEIGHT + 84
    parts += [
        heading(LEFT, second - 46, "GNNSched's Figure 10: costs ÷ run time, in thousandths; "
                                   "dashed: the paper"),
        *_key(LEFT, second - 32, [(colour, name) for _, colour, name in PARTS]),
    ]  # fmt: skip
    for number, load in enumerate(result["paper_cost"]):
        rows = [row for row in result["costs"] if row["load"] == load]
        parts += _costs(load, rows, result["costs"], LEFT + number * (PANEL + GAP), second + 22)
    return sheet(LEFT + 3 * PANEL + 2 * GAP + 24, second + HEIGHT + 60, parts)


def _key(x: float, y: float, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    for colour, name in entries:
        yield tag("rect", x=x, y=y, width=10, height=10, fill=colour)
        yield text(x + 15, y + 9, name)
        x += 36 + 7.0 * len(name)


def _errors(
    model: str, rows: Sequence[Mapping[str, Any]], claim: float, left: float, top: float
) -> Iterator[str]:
    """Yield dots by data set, in order of size."""
    up = Scale(_LOWEST, _HIGHEST, top + HEIGHT, top)
    yield text(left, top - 8, model.upper())
    marks = (_LOWEST, -0.3, 0, 0.3, _HIGHEST)
    yield from rules(left, PANEL, [(up(share), f"{share:+.0%}") for share in marks])
    for edge in (-claim, claim):
        yield path(f"M{left:g} {up(edge):.1f}h{PANEL:g}", LATE, 0.8, stroke_dasharray="3 3")
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    width = PANEL / len(datasets)
    for number, dataset in enumerate(datasets):
        its = sorted(
            (row for row in rows if row["dataset"] == dataset),
            key=lambda row: row["measured_bytes"],
        )
        start = left + number * width
        yield text(start + width / 2, top + HEIGHT + 16, dataset, anchor="middle")
        for place, row in enumerate(its):
            x = start + 4 + (width - 8) * (place + 0.5) / len(its)
            for name, colour in (("table_2_error", TABLE_2), ("error", OURS)):
                yield tag("circle", cx=x, cy=up(row[name]), r=1.8, fill=colour)


def _costs(
    load: str, rows: Sequence[Mapping[str, Any]], all_rows: Sequence[Mapping[str, Any]],
    left: float, top: float,
) -> Iterator[str]:  # fmt: skip
    """Yield a bar of three parts for each system, and the paper's total."""
    highest = 1.15 * max(max(row["permille"], row["paper_permille"]) for row in all_rows)
    up = Scale(0, highest, top + HEIGHT, top)
    yield text(left, top - 8, f"{load} load")
    step = _step(highest)
    marks = [step * number for number in range(int(highest / step) + 1)]
    yield from rules(left, PANEL, [(up(mark), f"{mark:g} ‰") for mark in marks])
    for number, row in enumerate(rows):
        x = left + 20 + number * (_BAR + _BAR_GAP)
        below = 0.0
        for name, colour, _ in PARTS:
            height = up(below) - up(below + row[name])
            yield tag("rect", x=x, y=up(below + row[name]), width=_BAR, height=height, fill=colour)
            below += row[name]
        label = f"{row['permille']:.2f}"
        yield text(x + _BAR / 2, up(below) - 5, label, anchor="middle")
        yield text(x + _BAR / 2, top + HEIGHT + 16, NAMES[row["system"]], anchor="middle")
    y = up(rows[0]["paper_permille"])
    yield path(f"M{left:g} {y:.1f}h{PANEL:g}", DARK, 1, stroke_dasharray="4 3")
    yield text(left + PANEL, y - 4, f"paper {rows[0]['paper_permille']:g}", anchor="end")


def _step(highest: float) -> float:
    """Return the distance between marks."""
    return next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if highest / step <= 6)
