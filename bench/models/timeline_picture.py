"""Draws docs/estimates.svg: a traced forward pass, and the planes its memory is estimated by.

    python -m bench.models.timeline_picture

Left, live bytes of a 3 × 64 GraphSAGE over the allocations and frees of one pass, twice: for a
graph with few edges and for one with many. The moments that hold the peak somewhere are marked.
Right, what those moments become: one line each over the number of edges, and the hull above them.
"""

import math
from itertools import accumulate

import torch

from bench.kit.architectures import load
from bench.kit.result import DOCS_PATH
from serve.estimate.calibration import Linear
from serve.estimate.memory import MemoryTrace, peak_at
from serve.lane.measure.calibrate import measure_memory
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.measure.tracing import trace

RESULT = DOCS_PATH / "estimates.svg"
NODES = 1_000
FEW, MANY = 300, 6_000
WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, GAP = 960, 420, 64, 48, 390, 250, 84
COLOURS = ("#1f6feb", "#c4450c", "#2c8a3d", "#8250df")
GREY = "#8a8f98"


def main() -> None:
    torch.set_num_threads(1)
    loaded, signature = load("sage", features=32, classes=7)
    traces = []
    for num_edges in (FEW, MANY):
        inputs = probe_graph(NODES, num_edges, Shape.PLAIN, loaded.spec.inputs, signature)

        def run(inputs: dict[str, torch.Tensor] = inputs) -> torch.Tensor:
            return loaded.run(inputs)

        traces.append(trace(run, loaded.module, NODES, num_edges))
    planes = measure_memory(loaded, signature, max_bytes=1 << 28).activations
    RESULT.write_text(picture(traces, planes), encoding="utf-8")


def picture(traces: list[MemoryTrace], planes: tuple[Linear, ...]) -> str:
    top_bytes = 1.08 * max(found.peak_bytes for found in traces)
    right = LEFT + PLOT_WIDTH + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#57606a">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, f"One forward pass, {NODES:,} nodes: live bytes", bold=True),
        _text(right, 24, "The same moments as planes over N and E, here N fixed", bold=True),
        *_axes(LEFT, top_bytes, f"allocations and frees, in order; grey with {FEW} edges", ()),
        *_axes(right, top_bytes, "edges", (0, 2_000, 4_000, 6_000)),
        *_timelines(traces, planes, top_bytes),
        *_lines(right, planes, top_bytes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _y(value: float, top_bytes: float) -> float:
    return round(TOP + PLOT_HEIGHT * (1 - value / top_bytes), 1)


def _axes(left: int, top_bytes: float, name: str, edges: tuple[int, ...]) -> list[str]:
    bottom = TOP + PLOT_HEIGHT
    step = 2 ** math.floor(math.log2(top_bytes / 3))
    parts = []
    for k in range(int(top_bytes // step) + 1):
        y = _y(k * step, top_bytes)
        parts += [
            f'<path d="M{left} {y}h{PLOT_WIDTH}" stroke="#d8dee4"/>',
            _text(left - 8, y + 4, f"{k * step / 2**20:.2g} MiB", anchor="end"),
        ]
    for count in edges:
        x = left + PLOT_WIDTH * count / MANY
        parts.append(_text(x, bottom + 18, f"{count:,}", anchor="middle"))
    return [*parts, _text(left + PLOT_WIDTH / 2, bottom + 38, name, anchor="middle")]


def _timelines(
    traces: list[MemoryTrace], planes: tuple[Linear, ...], top_bytes: float
) -> list[str]:
    parts = []
    for found in traces:
        live = [0, *accumulate(found.sizes)]
        width = PLOT_WIDTH / len(live)
        path = f"M{LEFT} {_y(0, top_bytes)}"
        for i, value in enumerate(live):
            path += f"V{_y(value, top_bytes)}H{LEFT + (i + 1) * width:.1f}"
        many = found.num_edges == MANY
        parts.append(
            f'<path d="{path}" fill="none" stroke="{"#24292f" if many else GREY}" '
            f'stroke-width="1.5"/>'
        )
        peak = max(range(len(live)), key=live.__getitem__)
        x, y = LEFT + (peak + 0.5) * width, _y(live[peak], top_bytes)
        holder = max(planes, key=lambda p: p.at(found.num_nodes, found.num_edges))
        colour = COLOURS[planes.index(holder) % len(COLOURS)]
        parts += [
            f'<circle cx="{x:.1f}" cy="{y}" r="4.5" fill="{colour}"/>',
            _text(x + 8, y - 8, f"peak with {found.num_edges:,} edges", colour),
        ]
    return parts


def _lines(left: int, planes: tuple[Linear, ...], top_bytes: float) -> list[str]:
    def point(count: float, value: float) -> str:
        return f"{left + PLOT_WIDTH * count / MANY:.1f} {_y(value, top_bytes)}"

    hull = [(e, peak_at(planes, NODES, e)) for e in range(0, MANY + 1, 50)]
    parts = [
        f'<path d="M{"L".join(point(e, value) for e, value in hull)}" fill="none" '
        'stroke="#24292f" stroke-opacity="0.18" stroke-width="9" stroke-linecap="round"/>'
    ]
    for i, plane in enumerate(planes):
        colour = COLOURS[i % len(COLOURS)]
        ends = point(0, plane.at(NODES, 0)), point(MANY, plane.at(NODES, MANY))
        name = f"{plane.nodes:g} N + {plane.edges:g} E   {plane.where}"
        parts += [
            f'<path d="M{ends[0]}L{ends[1]}" stroke="{colour}" stroke-width="1.5"/>',
            _text(left, TOP + PLOT_HEIGHT + 64 + 17 * i, name, colour),
        ]
    return parts


def _text(
    x: float, y: float, text: str, colour: str = "", *, anchor: str = "start", bold: bool = False
) -> str:
    fill = f' fill="{colour}"' if colour else ""
    weight = ' font-weight="600" fill="#24292f"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{fill}{weight}>{text}</text>'


if __name__ == "__main__":
    main()
