"""Measure what it is worth to a lane to keep freed memory, and by which setting of glibc.

    python -m bench.models.allocators [--quick] [--passes 3] [--rounds 3]

One process for each way to set up glibc's allocator, all on one core and one thread; they take
turns on graphs of the same sizes, in processor time. `faults` are pages that a forward pass asked
the kernel for; `pages_over_live` is the rise of resident memory ÷ the peak of live tensors and
large blocks. All but `stock` run with the memory meter preloaded, as lanes do. `32 MiB` lets blocks
up to that size (glibc's largest) come from the heap, `no mmap` blocks of any size; both keep
256 MiB of what was freed.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench.kit.measure import in_turns
from bench.kit.resident import status_bytes
from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from serve import native

EDGES_PER_NODE = 10
SIZES = {"in_channels": 32, "hidden_channels": 128, "out_channels": 8, "num_layers": 3}
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
WAYS: dict[str, dict[str, str]] = {
    "stock": {},
    "meter": {},
    "32 MiB": KEEP | {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)},
    "no mmap": KEEP | {"MALLOC_MMAP_MAX_": "0"},
    "huge pages": KEEP | {"MALLOC_MMAP_MAX_": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}
SCRIPT = Script(
    "allocators",
    full={
        "passes": 3, "rounds": 3, "models": ("gcn", "sage"), "nodes": (1_000, 8_000, 20_000),
        "child": False,
    },
    quick={"passes": 1, "rounds": 1, "models": ("gcn",), "nodes": (1_000,)},
    tables=[
        Table("A forward pass", "rows", {
            "model": "{model}", "nodes": "{nodes:,}", "way": "{way}",
            "processor time, ms": "{run_ms:.2f}", "page faults": "{faults:.0f}",
            "pages ÷ live": "{pages_over_live:.2f}",
        })
    ],
)  # fmt: skip


def start(way: str) -> "subprocess.Popen[str]":
    """Return a process with the allocator set up that way."""
    core = max(os.sched_getaffinity(0))
    library = native.meter_library_path()
    preload = {} if way == "stock" or library is None else {"LD_PRELOAD": str(library)}
    return subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-m", "bench.models.allocators", "--child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **WAYS[way], **preload},
    )


def ask(process: "subprocess.Popen[str]", *question: object) -> dict[str, float]:
    """Return the process's answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(*question, file=process.stdin, flush=True)
    answer: dict[str, float] = json.loads(process.stdout.readline())
    return answer


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each model, size and way."""
    processes = {way: start(way) for way in WAYS}
    rows = []
    for model, nodes in product(options.models, options.nodes):
        asked = {
            way: partial(ask, process, model, nodes, options.passes)
            for way, process in processes.items()
        }
        for way, found in in_turns(asked, options.rounds).items():
            figures = {key: median(one[key] for one in found) for key in found[0]}
            rows.append({"model": model, "nodes": nodes, "way": way, **figures})
    for process in processes.values():
        process.communicate()
    return {"rows": rows}


def child() -> None:
    """Answer each line `model nodes passes` with the medians of the passes."""
    import torch

    from serve.models import zoo

    torch.set_num_threads(1)
    meter = native.Meter.attach()
    modules: dict[str, Any] = {}
    for line in sys.stdin:
        name, nodes, passes = line.split()[0], *map(int, line.split()[1:])
        module = modules.setdefault(name, getattr(zoo, name)(**SIZES).eval())
        x = torch.randn(nodes, SIZES["in_channels"])
        edges = torch.randint(nodes, (2, EDGES_PER_NODE * nodes))
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        if meter is not None:
            meter.insert(1 << 40)
        taken_ms, faults = [], []
        for _ in range(passes):
            begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            started_ns = time.thread_time_ns()
            with torch.inference_mode():
                module(x, edges)
            taken_ms.append((time.thread_time_ns() - started_ns) / 1e6)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
        answer = {"run_ms": median(taken_ms), "faults": median(faults)}
        if meter is not None:
            grown = status_bytes("VmHWM") - before
            answer["pages_over_live"] = grown / meter.held_peak_bytes()
            meter.clear()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if SCRIPT.parse(__doc__).child:
        child()
    else:
        SCRIPT.main(measure, __doc__)
