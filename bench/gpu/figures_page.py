"""One page of figures from the findings of ``make gpu-check``; it needs no network and no scripts.

    python -m bench.gpu.figures_page bench/results/gpu.json gpu.html

A figure whose stage was not run is left out.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

# It is imported by a script on a machine where nothing of gnnserve is installed.
from bench.gpu.aims import verdicts
from bench.gpu.findings import load

PAGE = "gpu.html"
#: A bar's label, its length, and what is written behind it.
Bar = tuple[str, float, str]
Results = Mapping[str, Any]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: .15em .7em; text-align: left; }
.label { text-align: right; white-space: nowrap; } .bars td { padding: .08em .5em; }
.bar { background: #4477aa; height: .9em; } .told { white-space: nowrap; }
.well { color: #1a6b2f; } .ill { color: #b3261e; font-weight: 600; } .part { color: #7a5200; }
.open { color: #666; } .well, .ill, .part, .open { white-space: nowrap; }
tr + tr td { border-top: 1px solid #ddd; }
.bars tr + tr td { border: 0; } td { vertical-align: top; }
.dry { background: #fff3cd; padding: .5em; } td:first-child { white-space: nowrap; }
"""

_COLOURS = {
    **dict.fromkeys(("PASS", "ok"), " class=well"),
    **dict.fromkeys(("MISS", "FAILED", "cut off"), " class=ill"),
    "PART": " class=part",
    "not measured": " class=open",
}


def page(found: Mapping[str, Any]) -> str:
    """Return the page, as HTML."""
    results, stages = found["results"], found["stages"]
    parts = ["<h1>gnnserve on a GPU</h1>"]
    if any(result.get("dry") for result in results.values()):
        parts.append("<p class=dry>A dry run on a processor: the numbers mean nothing.</p>")
    parts += [f"<p>{escape(machine)}</p>" for machine in sorted(_machines(results))]
    parts += ["<h2>Aims</h2>", _aims(results, stages), "<h2>Stages</h2>", _stages(stages)]
    for title, note, make in _FIGURES:
        if bars := _bars_of(make, results):
            parts += [f"<h2>{escape(title)}</h2><p>{escape(note)}</p>", _drawn(bars)]
    body = "\n".join(parts)
    head = f"<meta charset=utf-8><title>gnnserve on a GPU</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n"


def _machines(results: Results) -> set[str]:
    """Return a line for each machine that the results are from."""
    gpus = [result.get("machine", {}).get("gpu") or [] for result in results.values()]
    return {", ".join(map(str, gpu)) for gpu in gpus if gpu}


def _aims(results: Results, stages: Mapping[str, Any]) -> str:
    rows = [(str(v.number), v.what, v.word, v.found) for v in verdicts(results, stages)]
    return _table(("", "aim", "verdict", "found"), rows)


def _stages(stages: Mapping[str, Any]) -> str:
    rows = [
        (name, row["state"], str(row.get("seconds", "")), row.get("why", ""))
        for name, row in stages.items()
    ]
    return _table(("stage", "end", "seconds", "why"), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in which a verdict or an end is also shown by its colour."""
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += [
        "".join(f"<td{_COLOURS.get(cell, '')}>{escape(cell)}</td>" for cell in row) for row in rows
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _bars_of(make: Callable[[Results], Iterator[Bar]], results: Results) -> list[Bar]:
    """Return the figure's bars, none when its stage left too little behind."""
    try:
        return list(make(results))
    except (KeyError, IndexError):
        return []


def _drawn(bars: list[Bar]) -> str:
    most = max(length for _, length, _ in bars) or 1.0
    rows = [
        f"<tr><td class=label>{escape(label)}</td><td style='width:30em'>"
        f"<div class=bar style='width:{100 * length / most:.1f}%'></div></td>"
        f"<td class=told>{escape(told_)}</td></tr>"
        for label, length, told_ in bars
    ]
    return f"<table class=bars>{''.join(rows)}</table>"


def _executors(results: Results) -> Iterator[Bar]:
    for name, rows in results["kernels"]["models"].items():
        for row in rows:
            for executor in ("eager", "csr"):
                ms = row[f"{executor}_ms"]["median"]
                label = f"{name}, {row['nodes']:,} nodes, {row['edges']:,} edges: {executor}"
                yield label, ms, f"{ms:g} ms"


def _bandwidth(results: Results) -> Iterator[Bar]:
    for row in results["kernels"]["aggregate"]:
        for who, key in (("ours", "gb_per_s"), ("torch.sparse", "torch_sparse_gb_per_s")):
            speed = row[key]["median"]
            yield f"{row['degrees']} degrees, width {row['width']}: {who}", speed, f"{speed:g} GB/s"
        for name, found in row["variants_gb_per_s"].items():
            speed = found["median"]
            label = f"{row['degrees']} degrees, width {row['width']}: ours, csr_{name}"
            yield label, speed, f"{speed:g} GB/s"


def _isolation(results: Results) -> Iterator[Bar]:
    alone = results["isolation"]["small_alone_ms"]["median"]
    yield "alone, median", alone, f"{alone:g} ms"
    for row in results["isolation"]["beside"]:
        p99, large = row["small_p99_ms"], row["large_ms_per_task"]["median"]
        behind = f"{p99:g} ms; a large one takes {large:g} ms"
        yield f"{row['reserved_sms']} reserved, p99", p99, behind


def _lanes(results: Results) -> Iterator[Bar]:
    for lanes, gain in results["concurrency"]["lanes"]["gain_over_one"].items():
        yield lanes, gain, f"{gain:g} times"


def _host(results: Results) -> Iterator[Bar]:
    for name, times in results["launching"]["host_us"].items():
        yield name, times["median"], f"{times['median']:g} µs"


#: Title, what a bar is, and the bars.
_FIGURES: tuple[tuple[str, str, Callable[[Results], Iterator[Bar]]], ...] = (
    ("Executors", "Time of a forward pass, by PyG's code and by csr.", _executors),
    ("Aggregation", "Bandwidth of what has to be read and written.", _bandwidth),
    (
        "Reserved multiprocessors",
        "Time of a small task beside four lanes of large ones.",
        _isolation,
    ),
    ("Lanes", "Throughput of several lanes, as a multiple of one.", _lanes),
    ("Launching", "Processor time of the host for each operator, and for a whole run.", _host),
)


def main() -> None:
    """Write the page for the findings named first to the path named second."""
    findings, path = map(Path, sys.argv[1:])
    path.write_text(page(load(findings)))


if __name__ == "__main__":
    main()
