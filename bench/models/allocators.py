"""What keeping freed memory is worth to a lane, and by which means.

    python -m bench.models.allocators [--runs N]

One process for each way to set up glibc's allocator, all on one core and one thread; they take
turns on graphs of the same sizes, and processor time is taken, which other work on the machine
hardly changes. Faults are pages that a
forward pass had to ask the kernel for; pages over live is how far resident memory rose, against the
peak of live tensors and large blocks. All but `stock` run with the memory meter preloaded, as lanes
do. `32 MiB` lets blocks up to that size (glibc's largest) come from the heap, `no mmap` blocks of
any size; both keep 256 MiB of what was freed. Writes bench/results/allocators.json.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.kit.result import RESULTS, ROOT, write_result
from serve import native

RESULT = RESULTS / "allocators.json"
MODELS = ("gcn", "sage")
NODES = (1_000, 8_000, 20_000)
EDGES_PER_NODE = 10
FEATURES, HIDDEN, CLASSES, LAYERS = 32, 128, 8, 3
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
WAYS: dict[str, dict[str, str]] = {
    "stock": {},
    "meter": {},
    "32 MiB": KEEP | {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)},
    "no mmap": KEEP | {"MALLOC_MMAP_MAX_": "0"},
    "huge pages": KEEP | {"MALLOC_MMAP_MAX_": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.runs)
        return
    found = measure(arguments.runs)
    document = {"rows": found}
    write_result(RESULT, document)
    show(found)


def measure(runs: int) -> list[dict[str, Any]]:
    """One row a model, size and way."""
    core = max(os.sched_getaffinity(0))
    command = [
        "taskset",
        "-c",
        str(core),
        sys.executable,
        "-m",
        "bench.models.allocators",
        "--child",
    ]
    children = {
        name: subprocess.Popen(
            [*command, "--runs", str(runs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=_environment(name),
        )
        for name in WAYS
    }
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        for nodes in NODES:
            taken: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
            for turn in range(4):
                for name, process in children.items():
                    assert process.stdin is not None
                    assert process.stdout is not None
                    process.stdin.write(f"{model} {nodes}\n")
                    process.stdin.flush()
                    answer = json.loads(process.stdout.readline())
                    if turn:  # the first warms up
                        taken[name].append(answer)
            rows += [
                {"model": model, "nodes": nodes, "way": name}
                | {key: statistics.median(one[key] for one in found) for key in found[0]}
                for name, found in taken.items()
            ]
    for process in children.values():
        process.communicate()
    return rows


def _environment(name: str) -> dict[str, str]:
    library = native.meter_library_path()
    preload = {} if name == "stock" or library is None else {"LD_PRELOAD": str(library)}
    return {**os.environ, "OMP_NUM_THREADS": "1", **WAYS[name], **preload}


def child(runs: int) -> None:
    """Answer each `model nodes` with the median of `runs` passes."""
    import torch

    from serve.models import zoo

    torch.manual_seed(0)
    torch.set_num_threads(1)
    modules = {
        name: getattr(zoo, name)(
            in_channels=FEATURES,
            hidden_channels=HIDDEN,
            out_channels=CLASSES,
            num_layers=LAYERS,
        ).eval()
        for name in MODELS
    }
    meter = native.Meter.attach()
    for line in sys.stdin:
        model, nodes = line.split()[0], int(line.split()[1])
        x = torch.randn(nodes, FEATURES)
        edges = torch.randint(nodes, (2, EDGES_PER_NODE * nodes))
        passes, faults = [], []
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        if meter is not None:
            meter.insert(1 << 40)
        for _ in range(runs):
            start_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            started = time.thread_time_ns()
            with torch.inference_mode():
                modules[model](x, edges)
            passes.append((time.thread_time_ns() - started) / 1e6)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start_faults)
        answer = {
            "run_ms": statistics.median(passes),
            "faults": statistics.median(faults),
        }
        if meter is not None:
            grown = _status_bytes("VmHWM") - before
            answer["pages_over_live"] = grown / meter.held_peak_bytes()
            meter.clear()
        print(json.dumps(answer), flush=True)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def show(rows: list[dict[str, Any]]) -> None:
    """Milliseconds, and faults a pass."""
    table = Table(
        title=f"Median ms of processor time a pass (page faults; pages ÷ live), {LAYERS} × {HIDDEN}"
    )
    table.add_column("model")
    table.add_column("nodes", justify="right")
    for name in WAYS:
        table.add_column(name, justify="right")
    cells = {(row["model"], row["nodes"], row["way"]): row for row in rows}
    for model in MODELS:
        for nodes in NODES:
            found = [cells[model, nodes, name] for name in WAYS]
            texts = [
                f"{row['run_ms']:.2f} ({row['faults']:.0f}; {row.get('pages_over_live', 0):.2f})"
                for row in found
            ]
            table.add_row(model, f"{nodes:,}", *texts)
    Console().print(table)


if __name__ == "__main__":
    main()
