"""Minimal SVG drawing: escaped elements, scales with round ticks, a canvas with axes.

Elements carry classes; the style sheet gives colours and fonts. An element with `data-t` shows that
text when it is pointed at or tapped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Tick = tuple[float, str]
#: Width of a character of a label, at most, where letters are large enough for a phone.
_CHARACTER = 8.4


def tag(name: str, *inside: str, **attributes: object) -> str:
    """Return the element `<name …>inside</name>`.

    The attribute `cls` becomes `class`, `_` in a name becomes `-`, and None omits an attribute.
    """
    text = "".join(
        f' {"class" if key == "cls" else key.replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{text}>{''.join(inside)}</{name}>" if inside else f"<{name}{text}/>"


def _value(value: object) -> str:
    return number(value) if isinstance(value, int | float) else escape(str(value))


def number(value: float) -> str:
    """Format a coordinate to a tenth of a unit, without a trailing zero."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, cls: str = "", anchor: str | None = None) -> str:
    """Return a text element; `anchor` is start, middle or end."""
    return tag("text", escape(content), x=x, y=y, cls=cls or None, text_anchor=anchor)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [lo, hi] to [start, end] in user units, on a linear or logarithmic scale."""

    lo: float
    hi: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the coordinate of `value`, clamped to the scale."""
        value = min(max(value, self.lo), self.hi)
        if self.log:
            share = math.log(value / self.lo) / math.log(self.hi / self.lo)
        else:
            share = (value - self.lo) / (self.hi - self.lo)
        return self.start + share * (self.end - self.start)


def nice_step(span: float, count: int) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that cuts `span` into about `count` parts."""
    raw = span / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.999)


def linear_ticks(lo: float, hi: float, count: int, label: Callable[[float], str]) -> list[Tick]:
    """Return ticks at round values within [lo, hi]."""
    step = nice_step(hi - lo, count)
    first = math.ceil(lo / step - 1e-9)
    values = (index * step for index in range(first, math.floor(hi / step + 1e-9) + 1))
    return [(value, label(value)) for value in values]


def count_ticks(hi: float, count: int) -> list[Tick]:
    """Return ticks at round integers from 0 to `hi`."""
    whole = linear_ticks(0, hi, count, count_label)
    return [tick for tick in whole if tick[0] == round(tick[0])]


def doubling_ticks(
    lo: float, hi: float, factor: float, label: Callable[[float], str]
) -> list[Tick]:
    """Return ticks at `lo`, `lo`·factor, … up to `hi`."""
    steps = round(math.log(hi / lo) / math.log(factor))
    return [(lo * factor**i, label(lo * factor**i)) for i in range(steps + 1)]


@dataclass(frozen=True, slots=True)
class Canvas:
    """Outer size and margins of a plot."""

    width: float
    height: float
    left: float = 52
    right: float = 16
    top: float = 14
    bottom: float = 40

    @property
    def x_end(self) -> float:
        """Right edge of the plotting area."""
        return self.width - self.right

    @property
    def y_end(self) -> float:
        """Bottom edge of the plotting area."""
        return self.height - self.bottom

    def svg(self, title: str, *inside: str) -> str:
        """Return the picture; `title` is its accessible name."""
        return tag(
            "svg",
            *inside,
            viewBox=f"0 0 {number(self.width)} {number(self.height)}",
            role="img",
            aria_label=title,
        )

    def x_axis(self, scale: Scale, ticks: Sequence[Tick], title: str, y: float = 0.0) -> str:
        """Return an axis with labels below the plotting area, or at the height `y`.

        Labels that would reach beyond the picture end, or begin, at its edge.
        """
        y = y or self.y_end
        parts = []
        for value, label in ticks:
            at, half = scale(value), _CHARACTER * len(label) / 2
            anchor = "start" if at < half else "end" if at + half > self.width else "middle"
            edge = {"start": 0.0, "end": self.width, "middle": at}[anchor]
            parts.append(text(edge, y + 17, label, "tick", anchor))
        parts.append(
            tag("path", d=f"M{number(scale.start)} {number(y)}H{number(scale.end)}", cls="axis")
        )
        if title:
            parts.append(text((scale.start + scale.end) / 2, y + 34, title, "title", "middle"))
        return "".join(parts)

    def y_axis(self, scale: Scale, ticks: Sequence[Tick]) -> str:
        """Return grid lines across the plotting area with labels on the left."""
        lines = "".join(
            f"M{number(self.left)} {number(scale(value))}H{number(self.x_end)}"
            for value, _ in ticks
        )
        labels = (
            text(self.left - 7, scale(value) + 4, label, "tick", "end") for value, label in ticks
        )
        return tag("path", d=lines, cls="grid") + "".join(labels)


def count_label(value: float) -> str:
    """Format a count: `1,200` or `15k`."""
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:,.10g}"
