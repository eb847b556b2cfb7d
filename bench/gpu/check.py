"""Everything that needs a GPU, in one go: build, test, measure. `make gpu-check` calls this.

    python3 bench/gpu/check.py [--only a,b] [--skip a,b] [--minutes M] [--quick [a,b]] [--dry]
        [--out FILE]
    python3 bench/gpu/check.py --merge FILE...

Runs on a bare machine with CUDA's nvcc, torch, torch-geometric, nanobind, cmake and ninja, without
a network and without an installed gnnserve. Every stage is a process of its own with a time limit;
one that fails or hangs leaves the others alone. The whole output of each is in
build/gpu/<stage>.log. After each stage all that was found, by this call or by others before it, is
put together in one file, bench/results/gpu.json or FILE; the last lines say of each aim of
``bench.gpu.aims`` what became of it. Such files of several machines become one with `--merge`, what
is found later in place of what was found before.

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
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This file is run as a script, on a machine where nothing of gnnserve is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench.gpu.aims import told

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"
RESULT = ROOT / "bench" / "results" / "gpu.json"
ALL = "all"
TAIL_LINES = 25
_STACKS_S = 2.0


@dataclass(frozen=True)
class Stage:
    """One step: a shell command, or a bench's module with its arguments."""

    name: str
    command: str
    limit_s: int
    needs: tuple[str, ...] = ()


def stages(quick: Collection[str] = (), *, dry: bool = False) -> list[Stage]:
    """All of them, in order; those that tell most in the least time come first.

    `quick`: names of those that are to tell less in less time, or ALL.
    """
    python = sys.executable

    def bench(name: str, limit_s: int, needs: tuple[str, ...] = (), part: str = "") -> Stage:
        stage = f"{name}_{part}" if part else name
        flags = " --quick" if ALL in quick or stage in quick else ""
        flags += " --dry" if dry else ""
        return Stage(stage, f"{python} -m bench.gpu.{name} {part}{flags}", limit_s, needs)

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
        bench("serving", 300, engine, "equality"),
        bench("pmc", 180, engine),
        bench("concurrency", 240),
        bench("gather", 240),
        bench("staging", 150),
        bench("recurring", 400, engine),
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
    parser.add_argument("--quick", nargs="?", const=ALL, default="", help="all, or those stages")
    parser.add_argument("--dry", action="store_true", help="without a GPU, to see that it works")
    parser.add_argument("--out", type=Path, help="in place of bench/results/gpu.json")
    parser.add_argument("--merge", nargs="+", type=Path, help="run nothing")
    arguments = parser.parse_args()
    out = arguments.out or (BUILD / "dry.json" if arguments.dry else RESULT)
    if arguments.merge:
        found = together(json.loads(path.read_text()) for path in arguments.merge)
        write(found, out)
        tell(found)
        return 0
    ends_at = time.monotonic() + 60 * arguments.minutes
    BUILD.mkdir(parents=True, exist_ok=True)
    environment = prepare()
    only, skip, quick = (
        set(filter(None, text.split(",")))
        for text in (arguments.only, arguments.skip, arguments.quick)
    )
    known = stages(quick, dry=arguments.dry)
    unknown = (only | skip | quick) - {stage.name for stage in known} - {ALL}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}: {', '.join(s.name for s in known)}")
    results = BUILD.parent / "gpu-dry" if arguments.dry else BUILD / "results"
    content = BUILD / ("dry.json" if arguments.dry else "result.json")
    found = json.loads(content.read_text()) if content.exists() else {"stages": {}, "results": {}}
    failed = False
    for stage in known:
        if (only and stage.name not in only) or stage.name in skip:
            continue
        left_s = ends_at - time.monotonic()
        missing = [name for name in stage.needs if not importable(name)]
        if missing:
            row = {"state": "not run", "why": f"needs {', '.join(missing)}"}
        elif left_s < 10:
            row = {"state": "not run", "why": "no time left"}
        else:
            (results / f"{stage.name}.json").unlink(missing_ok=True)
            row = attempt(stage, environment, min(stage.limit_s, left_s))
        failed = failed or row["state"] == "FAILED"
        if row["state"] != "not run" or stage.name not in found["stages"]:
            found = together([found, {"stages": {stage.name: row}, "results": read(results)}])
        for path in (content, out):
            write(found, path)
    tell(found)
    return int(failed)


def read(folder: Path) -> dict[str, Any]:
    """What the stages have found, by name; one that was cut off while it wrote is left out."""
    results = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError):
            results[path.stem] = json.loads(path.read_text())
    return results


def together(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The stages and results of all, the later ones in place of those before."""
    merged: dict[str, Any] = {"stages": {}, "results": {}}
    for one in found:
        for part in merged:
            merged[part] |= one[part]
    return merged


def write(found: dict[str, Any], path: Path) -> None:
    """Keep it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def tell(found: dict[str, Any]) -> None:
    """Print how each stage ended, what must hold and does not, and every aim."""
    print("\n==> stages")
    for name, row in found["stages"].items():
        print(f"{row['state']:8} {name:18} {row.get('seconds', ''):>7} {row.get('why', '')}")
    print("\n==> aims")
    for line in told(found["results"]):
        print(line)


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


def importable(module: str) -> bool:
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


if __name__ == "__main__":
    raise SystemExit(main())
