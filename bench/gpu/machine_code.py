"""Show what nvcc makes of the kernels along edges: registers, spills, and reads in flight.

    python -m bench.gpu.machine_code [--architecture sm_90]

A team hides the latency of memory by having several reads of 16 bytes on their way before it uses
the first. For each kernel this tells the most of them in a row that no arithmetic on floats stands
between. Needs nvcc, and cuobjdump (wheel nvidia-cuda-cuobjdump) on the path or named by CUOBJDUMP;
without cuobjdump the reads are not told. Needs no GPU.
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent.parent / "csrc"
_ROWS = "(Aggregation, Tile, std::int32_t)"
_HEAVY = "(Aggregation, Tile, std::int32_t, std::int64_t, const float*)"
_ATTEND = "(Attention, Tile, std::int32_t)"
#: The kernels that rows go through, on columns that units of 16 bytes fill: one unit a lane, and
#: two.
KERNELS = {
    f"{name} {units}": f"{kernel}<{argument}, 4, {units}>{parameters}"
    if kernel == "attend_rows"
    else f"{kernel}<4, {units}, {argument}{variant}>{parameters}"
    for name, kernel, argument, variant, parameters in (
        ("sum", "aggregate_rows", "Reduce::kSum", ", 8, false", _ROWS),
        ("sum, few ahead", "aggregate_rows", "Reduce::kSum", ", 4, false", _ROWS),
        ("sum, shuffled", "aggregate_rows", "Reduce::kSum", ", 8, true", _ROWS),
        ("max", "aggregate_rows", "Reduce::kMax", ", 8, false", _ROWS),
        ("sum of pieces", "aggregate_heavy", "Reduce::kSum", "", _HEAVY),
        ("additive", "attend_rows", "Score::kAdditive", "", _ATTEND),
        ("dynamic", "attend_rows", "Score::kDynamic", "", _ATTEND),
        ("dot", "attend_rows", "Score::kDot", "", _ATTEND),
    )
    for units in (1, 2)
}
_USES = re.compile(r"\b(FFMA|FADD|FMUL|FMNMX|FSETP|FSEL|MUFU)\b")


@dataclass(frozen=True)
class Found:
    """What one kernel was compiled to."""

    registers: int
    spilled_bytes: int
    #: None without cuobjdump.
    reads_in_flight: int | None


def nvcc() -> str | None:
    """Return the path of nvcc; None where there is none."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def cuobjdump() -> str | None:
    """Return the path of cuobjdump; None where there is none."""
    return os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")


def compiled(name: str, architecture: str = "sm_90") -> Found:
    """Compile the kernel of that name in KERNELS; raises RuntimeError with what nvcc says."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        source.write_text(
            '#include "attend.cuh"\nusing namespace gnnserve;\n'
            f"template __global__ void gnnserve::{KERNELS[name]};\n"
        )
        command = [
            str(nvcc()), "-std=c++20", f"-arch={architecture}", "-O3", "-Xptxas", "-v", "-cubin",
            f"-I{SOURCES / 'cuda'}", f"-I{SOURCES / 'include'}", "-o", str(binary), str(source),
        ]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if ran.returncode:
            raise RuntimeError(f"{name}: nvcc says {ran.stderr}")
        # Of the first kernel, the one asked for.
        told = ran.stderr.partition("Compiling entry function")[2]
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
        registers = re.search(r"Used (\d+) registers", told)
        if spills is None or registers is None:
            raise RuntimeError(f"{name}: ptxas tells no registers: {ran.stderr}")
        program, reads = cuobjdump(), None
        if program is not None:
            listing = [program, "-sass", str(binary)]
            code = subprocess.run(listing, capture_output=True, text=True, timeout=600, check=True)
            reads = reads_in_flight(code.stdout)
    return Found(int(registers[1]), sum(map(int, spills.groups())), reads)


def reads_in_flight(sass: str) -> int:
    """Return the most reads of 16 bytes in a row without arithmetic on floats between them.

    `sass` is cuobjdump's listing; of several kernels the one with the most counts.
    """
    most = now = 0
    for line in sass.splitlines():
        if "LDG" in line and ".128" in line:
            now += 1
            most = max(most, now)
        elif _USES.search(line) or "Function :" in line:
            now = 0
    return most


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--architecture", default="sm_90")
    architecture = parser.parse_args().architecture
    if nvcc() is None:
        raise SystemExit("there is no nvcc")
    print(f"{'kernel, units a lane':24}{'registers':>10}{'spilled':>10}{'in flight':>10}")
    for name in KERNELS:
        found = compiled(name, architecture)
        reads = "?" if found.reads_in_flight is None else str(found.reads_in_flight)
        print(f"{name:24}{found.registers:>10}{found.spilled_bytes:>10}{reads:>10}")


if __name__ == "__main__":
    main()
