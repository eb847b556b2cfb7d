"""Draw docs/estimates.svg: a traced forward pass, and the planes that estimate its memory.

    python -m bench.models.timeline_picture

Left, live bytes of a 3 × 64 GraphSAGE over the allocations and frees of one pass, twice: for a
graph with few edges and for one with many. Moments that hold the peak for some graph are
marked. Right, the same moments as lines over the number of edges, with their hull.
"""

import math
from collections.abc import Iterator
from itertools import accumulate

import torch

from bench.kit.architectures import load
from bench.kit.drawing import DARK, GREY, heading, path, rules, sheet
from bench.kit.result import DOCS_PATH
from serve.estimate.calibration import Linear
from serve.estimate.memory import MemoryTrace, peak_at
from serve.lane.measure.memory import measure_memory
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.measure.tracing import trace
from serve.obs.svg import Scale, tag, text

RESULT = DOCS_PATH / "estimates.svg"
NODES = 1_000
FEW, MANY = 300, 6_000
WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, GAP = 960, 420, 64, 48, 390, 250, 84
COLOURS = ("#1f6feb", "#c4450c", "#2c8a3d", "#8250df")


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
    """Return the SVG: the timelines of both traces, and the planes."""
    top_bytes = 1.08 * max(found.peak_bytes for found in traces)
    up = Scale(0, top_bytes, TOP + PLOT_HEIGHT, TOP)
    right = LEFT + PLOT_WIDTH + GAP
    across = Scale(0, MANY, right, right + PLOT_WIDTH)
    step = 2 ** math.floor(math.log2(top_bytes / 3))
    marks = [
        (up(k * step), f"{k * step / 2**20:.2g} MiB") for k in range(int(top_bytes // step) + 1)
    ]
    bottom = TOP + PLOT_HEIGHT
    order = f"allocations and frees, in order; grey with {FEW} edges"
    parts = [
        heading(LEFT, 24, f"One forward pass, {NODES:,} nodes: live bytes"),
        heading(right, 24, "The same moments as planes over N and E, here N fixed"),
        *rules(LEFT, PLOT_WIDTH, marks),
        *rules(right, PLOT_WIDTH, marks),
        text(LEFT + PLOT_WIDTH / 2, bottom + 38, order, anchor="middle"),
        text(right + PLOT_WIDTH / 2, bottom + 38, "edges", anchor="middle"),
        *(
            text(across(e), bottom + 18, f"{e:,}", anchor="middle")
            for e in range(0, MANY + 1, 2_000)
        ),
        *timelines(traces, planes, up),
        *lines(planes, across, up),
    ]
    return sheet(WIDTH, HEIGHT, parts)


def timelines(traces: list[MemoryTrace], planes: tuple[Linear, ...], up: Scale) -> Iterator[str]:
    """Yield the live bytes of each trace, its peak in the colour of the plane that holds it."""
    for found in traces:
        live = [0, *accumulate(found.sizes)]
        width = PLOT_WIDTH / len(live)
        steps = (f"V{up(at):.1f}H{LEFT + (i + 1) * width:.1f}" for i, at in enumerate(live))
        colour = DARK if found.num_edges == MANY else GREY
        yield path(f"M{LEFT} {up(0):.1f}{''.join(steps)}", colour, 1.5)
        peak = max(range(len(live)), key=live.__getitem__)
        x, y = LEFT + (peak + 0.5) * width, up(live[peak])
        holder = max(planes, key=lambda plane: plane.at(found.num_nodes, found.num_edges))
        colour = COLOURS[planes.index(holder) % len(COLOURS)]
        yield tag("circle", cx=x, cy=y, r=4.5, fill=colour)
        yield tag("g", text(x + 8, y - 8, f"peak with {found.num_edges:,} edges"), fill=colour)


def lines(planes: tuple[Linear, ...], across: Scale, up: Scale) -> Iterator[str]:
    """Yield each plane as a line over the edges, and the hull above them."""
    hull = (f"{across(e):.1f} {up(peak_at(planes, NODES, e)):.1f}" for e in range(0, MANY + 1, 50))
    yield path(f"M{'L'.join(hull)}", DARK, 9, stroke_opacity=0.18, stroke_linecap="round")
    for i, plane in enumerate(planes):
        colour = COLOURS[i % len(COLOURS)]
        ends = (f"{across(e):.1f} {up(plane.at(NODES, e)):.1f}" for e in (0, MANY))
        name = f"{plane.nodes:g} N + {plane.edges:g} E   {plane.where}"
        yield path(f"M{'L'.join(ends)}", colour, 1.5)
        yield tag("g", text(across(0), TOP + PLOT_HEIGHT + 64 + 17 * i, name), fill=colour)


if __name__ == "__main__":
    main()
