"""Everything that needs a GPU, in one go: build, test, measure. `make gpu-check` calls this.

    python3 bench/gpu/check.py [--only a,b] [--skip a,b] [--minutes M] [--quick] [--dry]

Runs on a bare machine with CUDA's nvcc, torch, torch-geometric, nanobind, cmake and ninja, without
a network and without an installed gnnserve. Every stage is a process of its own with a time limit;
one that fails or hangs leaves the others alone. The summary is in bench/results/gpu/summary.json
after each stage, the whole output of each in build/gpu/<stage>.log.

The stages `kernels`, `pmc` and `serving_*` need msgspec, which such a machine may lack: wheels in
the folder .whl are installed into build/gpu/site first. Without it they are told as not run.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"
SUMMARY = ROOT / "bench" / "results" / "gpu" / "summary.json"
TAIL_LINES = 25
_STACKS_S = 2.0


@dataclass(frozen=True)
class Stage:
    """One step: a shell command, or a bench's module with its arguments."""

    name: str
    command: str
    limit_s: int
    needs: tuple[str, ...] = ()


def stages(quick: bool, dry: bool) -> list[Stage]:
    """All of them, in order; those that tell most in the least time come first."""
    python = sys.executable
    flags = (" --quick" if quick else "") + (" --dry" if dry else "")

    def bench(name: str, limit_s: int, needs: tuple[str, ...] = (), part: str = "") -> Stage:
        command = f"{python} -m bench.gpu.{name} {part}{flags}"
        return Stage(f"{name}_{part}" if part else name, command, limit_s, needs)

    common = f"cmake -S csrc -G Ninja -DGNNSERVE_CUDA=ON -DPython_EXECUTABLE={python}"
    libraries = (
        f"{common} -B build/gpu/tests"
        " && cmake --build build/gpu/tests --target gnnserve_device gnnserve_cuda"
        " && cp build/gpu/tests/libgnnserve_{device,cuda}.so serve/"
    )
    extension = (
        f"{common} -B build/gpu/extension -DSKBUILD=2 -DSKBUILD_STATE=editable"
        f" -Dnanobind_DIR=$({python} -m nanobind --cmake_dir) && cmake --build build/gpu/extension"
        " && cmake --install build/gpu/extension --prefix ."
    )
    tests = "cmake --build build/gpu/tests && ctest --test-dir build/gpu/tests --output-on-failure"
    smi = "nvidia-smi; nvidia-smi topo -m; nvcc --version"
    torch = f"{python} -c 'import torch; print(torch.__version__, torch.cuda.is_available())'"
    engine = ("msgspec", "safetensors", "prometheus_client")
    return [
        Stage("machine", f"{smi}; {torch}", 60),
        Stage("libraries", libraries, 240),
        Stage("extension", extension, 240),
        bench("arena", 120),
        bench("equality", 120),
        bench("kernels", 240, engine),
        bench("serving", 240, engine, "equality"),
        bench("pmc", 180, engine),
        bench("concurrency", 240),
        bench("gather", 240),
        bench("staging", 150),
        bench("serving", 400, engine, "soak"),
        bench("serving", 150, engine, "pressure"),
        bench("serving", 540, engine, "figures"),
        Stage("ctest", tests, 240),
    ]


def main() -> int:
    """Run the stages; 0 when every stage that was to run passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="stages, by comma")
    parser.add_argument("--skip", default="", help="stages, by comma")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no stage after so long")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dry", action="store_true", help="without a GPU, to see that it works")
    arguments = parser.parse_args()
    ends_at = time.monotonic() + 60 * arguments.minutes
    BUILD.mkdir(parents=True, exist_ok=True)
    environment = prepare()
    only, skip = (set(filter(None, text.split(","))) for text in (arguments.only, arguments.skip))
    known = stages(arguments.quick, arguments.dry)
    unknown = (only | skip) - {stage.name for stage in known}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}: {', '.join(s.name for s in known)}")
    rows: dict[str, dict[str, Any]] = {}
    for stage in known:
        if (only and stage.name not in only) or stage.name in skip:
            continue
        left_s = ends_at - time.monotonic()
        missing = [name for name in stage.needs if not found(name)]
        if missing:
            rows[stage.name] = {"state": "not run", "why": f"needs {', '.join(missing)}"}
        elif left_s < 10:
            rows[stage.name] = {"state": "not run", "why": "no time left"}
        else:
            rows[stage.name] = attempt(stage, environment, min(stage.limit_s, left_s))
        keep(rows, arguments.dry)
    print("\n==> summary")
    for name, row in rows.items():
        print(f"{row['state']:8} {name:18} {row.get('seconds', ''):>7} {row.get('why', '')}")
    return int(any(row["state"] == "FAILED" for row in rows.values()))


def prepare() -> dict[str, str]:
    """Install the wheels that were brought along; the environment of all stages."""
    wheels = sorted((ROOT / ".whl").glob("*.whl"))
    if wheels:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade",
             "--target", str(SITE), *map(str, wheels)],
            check=False,
        )  # fmt: skip
    sys.path.insert(0, str(SITE))
    path = os.pathsep.join([str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1"}


def found(module: str) -> bool:
    """Whether it can be imported by the stages."""
    importlib.invalidate_caches()
    return importlib.util.find_spec(module) is not None


def attempt(stage: Stage, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run one stage to its end or its limit."""
    print(f"\n==> {stage.name} (at most {limit_s:.0f} s): {stage.command}", flush=True)
    log = BUILD / f"{stage.name}.log"
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"ulimit -c 0; {stage.command}"], cwd=ROOT, env=environment, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            # Where it stands: Python's fault handler writes every thread's stack to the log.
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(_STACKS_S)
        # Also what the stage started and left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(line[:400] for line in lines[-TAIL_LINES:]), flush=True)
    failures = [line[:300] for line in lines if line.startswith("FAIL ")]
    why = "" if code == 0 else "over its time limit" if code is None else f"exit code {code}"
    if failures:
        why += f"; {len(failures)} checks failed: {failures[0]}"
    seconds = round(time.monotonic() - started, 1)
    state = "ok" if code == 0 else "FAILED"
    return {"state": state, "seconds": seconds, "why": why, "failures": failures,
            "tail": [] if code == 0 else lines[-TAIL_LINES:]}  # fmt: skip


def keep(rows: dict[str, dict[str, Any]], dry: bool) -> None:
    """Write the summary, earlier stages of other calls included."""
    path = BUILD / "summary-dry.json" if dry else SUMMARY
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
