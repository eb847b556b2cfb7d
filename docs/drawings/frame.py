"""The frame of the pictures in docs/: a white sheet, headings, grids."""

from collections.abc import Iterable, Sequence

from serve.svg import tag, text

DARK, MUTED, RULE, GREY = "#24292f", "#57606a", "#d8dee4", "#8a8f98"
LATE = "#cf222e"
WIDTH = 960.0


def sheet(width: float, height: float, parts: Iterable[str]) -> str:
    """Return a white sheet with the parts on it."""
    return (
        tag(
            "svg", tag("rect", width=width, height=height, fill="white"), *parts,
            xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:g} {height:g}",
            font_family="system-ui, sans-serif", font_size=12, fill=MUTED,
        )
        + "\n"
    )  # fmt: skip


def heading(x: float, y: float, content: str) -> str:
    """Return a bold dark line of text."""
    return tag("g", text(x, y, content), fill=DARK, font_weight="600")


def path(points: str, colour: str, width: float = 1, **more: object) -> str:
    """Return a line along an SVG path."""
    return tag("path", d=points, fill="none", stroke=colour, stroke_width=width, **more)


def rules(left: float, width: float, marks: Sequence[tuple[float, str]]) -> Iterable[str]:
    """Yield a horizontal rule and a label to its left for each (y, label)."""
    for y, label in marks:
        yield path(f"M{left:g} {y:.1f}h{width:g}", RULE)
        yield text(left - 8, y + 4, label, anchor="end")
