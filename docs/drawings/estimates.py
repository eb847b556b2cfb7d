"""A traced forward pass, and the planes that estimate its memory.

Left its live bytes for few and for many edges, right the planes over nodes and edges with their
hull.
"""

import math
from functools import partial
from itertools import accumulate

import torch

from bench.kit.architectures import load
from docs.drawings.frame import DARK, GREY, WIDTH, heading, path, rules, sheet
from serve.estimate.calibration import Linear
from serve.estimate.memory import MemoryTrace, peak_at
from serve.lane.measure.memory import measure_memory
from serve.lane.measure.probe_graphs import Shape, probe_graph
from serve.lane.measure.tracing import trace
from serve.svg import Scale, tag, text

MIB = 1 << 20

NODES, FEW, MANY = 1_000, 300, 6_000
COLOURS = ("#1f6feb", "#c4450c", "#2c8a3d", "#8250df")


def traced() -> tuple[list[MemoryTrace], tuple[Linear, ...]]:
    """Return the traces of a 3 × 64 GraphSAGE on two graphs, and the planes that estimate them."""
    torch.set_num_threads(1)
    loaded, signature = load("sage", features=32, classes=7)
    traces = []
    for num_edges in (FEW, MANY):
        inputs = probe_graph(NODES, num_edges, Shape.PLAIN, loaded.spec.inputs, signature)
        traces.append(trace(partial(loaded.run, inputs), loaded.module, NODES, num_edges))
    return traces, measure_memory(loaded, signature, max_bytes=1 << 28).activations


def estimates_picture(traces: list[MemoryTrace], planes: tuple[Linear, ...]) -> str:
    """Return the SVG: the live bytes of both traces over time, and the planes over the edges."""
    left, top, width, bottom = 64.0, 48.0, 390.0, 298.0
    top_bytes = 1.08 * max(found.peak_bytes for found in traces)
    up = Scale(0, top_bytes, bottom, top)
    right = left + width + 84
    across = Scale(0, MANY, right, right + width)
    step = 2 ** math.floor(math.log2(top_bytes / 3))
    marks = [(up(k * step), f"{k * step / MIB:.2g} MiB") for k in range(int(top_bytes // step) + 1)]
    order = f"allocations and frees, in order; grey with {FEW} edges"
    parts = [
        heading(left, 24, f"One forward pass, {NODES:,} nodes: live bytes"),
        heading(right, 24, "The same moments as planes over N and E, here N fixed"),
        *rules(left, width, marks),
        *rules(right, width, marks),
        text(left + width / 2, bottom + 38, order, anchor="middle"),
        text(right + width / 2, bottom + 38, "edges", anchor="middle"),
        *(
            text(across(edges), bottom + 18, f"{edges:,}", anchor="middle")
            for edges in range(0, MANY + 1, 2_000)
        ),
    ]
    for found in traces:
        live = [0, *accumulate(found.sizes)]
        each = width / len(live)
        steps = (f"V{up(at):.1f}H{left + (i + 1) * each:.1f}" for i, at in enumerate(live))
        colour = DARK if found.counts[1] == MANY else GREY
        parts.append(path(f"M{left:g} {up(0):.1f}{''.join(steps)}", colour, 1.5))
        # The peak has the colour of the plane that holds it.
        peak = max(range(len(live)), key=live.__getitem__)
        x, y = left + (peak + 0.5) * each, up(live[peak])
        holder = max(planes, key=lambda plane: plane.at(*found.counts))
        colour = COLOURS[planes.index(holder) % len(COLOURS)]
        label = text(x + 8, y - 8, f"peak with {found.counts[1]:,} edges")
        parts += [tag("circle", cx=x, cy=y, r=4.5, fill=colour), tag("g", label, fill=colour)]
    hull = (f"{across(e):.1f} {up(peak_at(planes, NODES, e)):.1f}" for e in range(0, MANY + 1, 50))
    parts.append(path(f"M{'L'.join(hull)}", DARK, 9, stroke_opacity=0.18, stroke_linecap="round"))
    for i, plane in enumerate(planes):
        colour = COLOURS[i % len(COLOURS)]
        ends = (f"{across(e):.1f} {up(plane.at(NODES, e)):.1f}" for e in (0, MANY))
        nodes, edges = plane.per
        name = f"{nodes:g} N + {edges:g} E   {plane.where}"
        label = text(across(0), bottom + 64 + 17 * i, name)
        parts += [path(f"M{'L'.join(ends)}", colour, 1.5), tag("g", label, fill=colour)]
    return sheet(WIDTH, 420, parts)
