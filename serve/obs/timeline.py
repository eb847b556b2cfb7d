"""Timeline of a few seconds: runs on their lanes, waiting requests and reserved memory."""

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from serve.obs.frame import Column, Frame
from serve.obs.record import ServerRun
from serve.svg import (
    Canvas,
    Scale,
    count_label,
    linear_ticks,
    number,
    tag,
    text,
)
from serve.units import format_bytes, format_ms

_LANE_HEIGHT = 26.0


def timeline(frame: Frame, window: tuple[int, int], runs: Sequence[ServerRun]) -> str:
    """Draw the requests of a window, given by its begin and end in ns since the epoch.

    Colours distinguish groups; a red edge marks a late answer.
    """
    launched = frame.where(frame.launched)
    begin, end = window
    shown = launched.where((launched.launched_unix_ns < end) & (launched.finished_unix_ns > begin))
    lanes = sorted(set(shown["lane"].tolist()))
    lanes_end = 30 + _LANE_HEIGHT * len(lanes)
    canvas = Canvas(1104, lanes_end + 222, left=74, top=30, bottom=42)
    x = Scale(0.0, (end - begin) / 1e6, canvas.left, canvas.x_end)
    parts = [_lanes(canvas, x, shown, lanes, begin)]
    ran = np.where(frame.launched, frame.launched_unix_ns, frame["arrived_unix_ns"])
    waited_until = np.where(frame.launched, ran, frame["arrived_unix_ns"] + frame["latency_ns"])
    waiting = _levels(frame["arrived_unix_ns"], waited_until, np.ones(len(frame)), begin, end)
    parts.append(
        _area(canvas, x, waiting, "requests waiting", (lanes_end + 40, lanes_end + 88), "waiting")
    )
    held = _levels(
        launched.launched_unix_ns, launched.finished_unix_ns, launched["reserve_bytes"], begin, end
    )
    newest = max(runs, key=lambda run: run.started_unix_ns, default=None)
    budget = f", budget {format_bytes(newest.budget_bytes)}" if newest else ""
    title = f"memory reserved{budget}"
    parts.append(
        _area(canvas, x, held, title, (lanes_end + 126, canvas.y_end), "reserved",
              newest.budget_bytes if newest else 0)
    )  # fmt: skip
    moment = datetime.fromtimestamp(begin / 1e9, UTC)
    started = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d} UTC"
    ticks = linear_ticks(0, x.hi, 10, format_ms)
    return canvas.svg(
        "Lanes, waiting requests and reserved memory over time",
        *parts,
        canvas.x_axis(x, ticks, f"after {started}"),
    )


def _lanes(canvas: Canvas, x: Scale, shown: Frame, lanes: list[int], begin: int) -> str:
    row = {lane: canvas.top + i * _LANE_HEIGHT for i, lane in enumerate(lanes)}
    parts = [
        text(canvas.left, canvas.top - 10, "lanes", "strong"),
        *(
            text(canvas.left - 9, top + 16, f"lane {lane}", "tick", "end")
            for lane, top in row.items()
        ),
        *(
            tag("rect", x=canvas.left, y=top + 2, width=canvas.x_end - canvas.left,
                height=_LANE_HEIGHT - 5, cls="lane")
            for top in row.values()
        ),
    ]  # fmt: skip
    start = (shown.launched_unix_ns - begin) / 1e6
    stop = (shown.finished_unix_ns - begin) / 1e6
    for i in range(len(shown)):
        top = row[int(shown["lane"][i])] + 2
        left, width = x(start[i]), max(x(stop[i]) - x(start[i]) - 0.5, 0.8)
        group = int(shown["group_id"][i])
        bar = {"x": left, "width": width, "data_t": _tip(shown, i)}
        bar["data_g"] = f"{shown['run_id'][i]}.{group}"
        parts.append(tag("rect", y=top, height=_LANE_HEIGHT - 5, cls=f"run g{group % 8}", **bar))
        if shown.violated[i]:
            parts.append(tag("rect", y=top, height=3.5, cls="late", **bar))
    return "".join(parts)


def _tip(shown: Frame, i: int) -> str:
    def ms(name: str) -> str:
        return format_ms(shown[name][i] / 1e6)

    lines = [
        f"{shown['request_uid'][i]}  {shown['model'][i]}",
        f"{shown['num_nodes'][i]:,} nodes, {shown['num_edges'][i]:,} edges",
        f"waited {ms('quet_ns')}, ran {ms('run_ns')} (estimate {ms('run_estimate_ns')})",
        f"answered after {ms('latency_ns')}, target {ms('qos_target_ns')}",
        f"group {shown['group_id'][i]}, {shown['group_size'][i]} tasks",
    ]
    if shown.violated[i]:
        lines.append(f"late: {shown['cause'][i]}")
    return "\n".join(lines)


def _levels(
    start: Column, stop: Column, weight: Column, begin: int, end: int
) -> tuple[list[float], list[float]]:
    """Return times (ms after `begin`) and, from each on, the sum of weights of open intervals."""
    touching = (start < end) & (stop > begin)
    start, stop, weight = start[touching], stop[touching], weight[touching]
    times = np.concatenate([[begin], stop, start])
    order = np.argsort(times, kind="stable")
    change = np.concatenate([[0.0], -weight.astype(np.float64), weight.astype(np.float64)])
    levels = np.cumsum(change[order])
    moments = times[order]
    last = np.append(moments[1:] != moments[:-1], True) & (moments < end)
    inside = last & (moments >= begin)
    before = np.flatnonzero(moments <= begin)[-1]
    return (
        [0.0, *((moments[inside] - begin) / 1e6).tolist()],
        [float(levels[before]), *levels[inside].tolist()],
    )


def _area(
    canvas: Canvas,
    x: Scale,
    steps: tuple[list[float], list[float]],
    title: str,
    rows: tuple[float, float],
    cls: str,
    limit: int = 0,
) -> str:
    """Draw a step function as an area between two heights; marks `limit` if it is near."""
    top, base = rows
    times, levels = steps
    peak = max(levels)
    near = 0 < limit <= 3 * peak
    y = Scale(0, max(limit if near else 0, peak, 1.0) * 1.05, base, top)
    label = format_bytes if cls == "reserved" else count_label
    outline = f"M{number(x(times[0]))} {number(base)}" + "".join(
        f"H{number(x(time))}V{number(y(level))}" for time, level in zip(times, levels, strict=True)
    )
    at_limit = f"M{number(canvas.left)} {number(y(limit))}H{number(canvas.x_end)}"
    return "".join(
        [
            text(canvas.left, top - 10, f"{title}, at most {label(peak)} here", "strong"),
            canvas.y_axis(y, [(0, "0"), (peak, label(peak))] if peak else [(0, "0")]),
            tag("path", d=f"{outline}H{number(x.end)}V{number(base)}Z", cls=cls),
            tag("path", d=at_limit, cls="limit") if near else "",
        ]
    )
