"""Run everything that needs a GPU: build, test, measure. `make gpu-check` calls this.

    python3 bench/gpu/check.py [--minutes M] [--resume [FOLDER...]] [--only a,b] [--skip a,b]
        [--quick [a,b]] [--dry] [--out FOLDER]
    python3 bench/gpu/check.py --merge FILE... [--out FOLDER]

It runs on a bare machine with CUDA's nvcc, torch, torch-geometric, nanobind, cmake and ninja,
without a network and without an installed gnnserve. Every stage is a process with a time limit; one
that fails or hangs leaves the others alone, and none begins that usually takes longer than the rest
of the M minutes. The output of each is in build/gpu/<stage>.log.

The findings of this call and of earlier ones are in gpu.json, written again and again while stages
run; the last lines give the verdict on each aim of ``bench.gpu.aims``. The file is in
bench/results, or in FOLDER, or in the folder that the environment variable OUT names; in the latter
two, logs, calibrations and a page of figures lie beside it.

With `--resume` stages that passed are skipped, new ones come first, failed ones last; FOLDERs are
those of calls on other machines. `--merge` makes one file of several, later findings replacing
earlier ones.

Some stages need modules that such a machine may lack, msgspec above all: wheels in the folder .whl
are installed into build/gpu/site first. Stages that still lack a module are not run.
"""

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# This file is run as a script, on a machine where nothing of gnnserve is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench.gpu.figures_page import PAGE, page
from bench.gpu.findings import FINDINGS, Keeper, load, read, tell, together, write
from bench.gpu.stages import ALL, Stage, stages

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "gpu"
RESULTS = ROOT / "bench" / "results"
WHEELS = ROOT / ".whl"
TAIL_LINES = 25
_STACKS_S = 2.0
#: Interval at which findings are saved while a stage runs.
_KEEP_EVERY_S = 10.0
Found = dict[str, Any]


def main() -> int:
    """Run the stages; 0 when every stage that was to run passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="stages, by comma")
    parser.add_argument("--skip", default="", help="stages, by comma")
    parser.add_argument("--minutes", type=float, default=60.0, help="what there is for all of it")
    parser.add_argument("--quick", nargs="?", const=ALL, default="", help="all, or those stages")
    parser.add_argument("--dry", action="store_true", help="without a GPU, to see that it works")
    parser.add_argument("--out", type=Path, help="folder, in place of $OUT or bench/results")
    parser.add_argument("--resume", nargs="*", type=Path, help="only what did not end well before")
    parser.add_argument("--merge", nargs="+", type=Path, help="run nothing")
    arguments = parser.parse_args()
    ends_at = time.monotonic() + 60 * arguments.minutes
    keeper = keeper_for(arguments.out, dry=arguments.dry)
    if arguments.merge:
        found = together(load(path) for path in arguments.merge)
        write(found, keeper.folder / FINDINGS)
        _tell(found, keeper)
        return 0
    only, skip, quick = (
        set(filter(None, text.split(",")))
        for text in (arguments.only, arguments.skip, arguments.quick)
    )
    known = stages(quick, dry=arguments.dry)
    unknown = (only | skip | quick) - {stage.name for stage in known} - {ALL}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}: {', '.join(s.name for s in known)}")
    chosen = [
        stage for stage in known if (not only or stage.name in only) and stage.name not in skip
    ]
    keeper.build.mkdir(parents=True, exist_ok=True)
    found = together([*(keeper.take(folder) for folder in arguments.resume or ()), keeper.before()])
    if arguments.resume is not None:
        chosen = unfinished(chosen, found["stages"])
    environment = prepare(keeper.build / "site")
    tell_missing(chosen)
    call = Call(keeper, ends_at, partial(attempt, environment=environment, folder=keeper.build))
    found, failed = call.run(chosen, found)
    _tell(found, keeper)
    return int(failed)


def _tell(found: Found, keeper: Keeper) -> None:
    """Print the findings, and draw them where a folder was named for what is kept."""
    tell(found)
    if keeper.everything:
        (keeper.folder / PAGE).write_text(page(found))


def keeper_for(out: Path | None, *, dry: bool) -> Keeper:
    """Return what saves the findings."""
    build = BUILD.with_name(f"{BUILD.name}-dry") if dry else BUILD
    told = out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    folder = told or (build if dry else RESULTS)
    return Keeper(build, build / "result.json", folder, everything=told is not None)


def unfinished(chosen: list[Stage], before: Found) -> list[Stage]:
    """Return stages that have not passed: those that prepare, then new ones, then failed ones."""

    def rank(stage: Stage) -> int | None:
        row = before.get(stage.name, {"state": "not run"})
        if stage.prepares:
            return 0
        if row["state"] == "ok":
            return 2 if row.get("quick", False) and not stage.quick else None
        return 1 if row["state"] == "not run" else 3

    ranks = [(rank(stage), stage) for stage in chosen]
    return [stage for number in range(4) for rank, stage in ranks if rank == number]


@dataclass(frozen=True)
class Call:
    """Runs stages one after the other, within a time limit."""

    keeper: Keeper
    #: When the time is over, by `clock`.
    ends_at: float
    #: Runs one stage for at most that many seconds; calls its last argument now and then.
    attempt: Callable[[Stage, float, Callable[[], object]], Found]
    clock: Callable[[], float] = time.monotonic

    def run(self, chosen: list[Stage], found: Found) -> tuple[Found, bool]:
        """Return all findings, earlier ones included, and True when a stage failed."""
        failed = False
        for stage in chosen:
            left_s = self.ends_at - self.clock()
            row: Found = {"state": "not run", "why": obstacle(stage, found["stages"], left_s)}
            if not row["why"]:
                (self.keeper.build / "results" / f"{stage.name}.json").unlink(missing_ok=True)
                # If the machine goes away meanwhile, this is what is saved.
                so_far = partial(self._keep, stage, {"state": "cut off"}, found)
                row = self.attempt(stage, min(stage.limit_s, left_s), so_far)
            failed = failed or row["state"] == "FAILED"
            found = self._keep(stage, row, found)
        return found, failed

    def _keep(self, stage: Stage, row: Found, before: Found) -> Found:
        results = read(self.keeper.build / "results")
        row = {**row, "quick": stage.quick}
        found = together([before, {"stages": {stage.name: row}, "results": results}])
        self.keeper.keep(found)
        return found


def obstacle(stage: Stage, found: Found, left_s: float) -> str:
    """Return why a stage cannot begin; empty when it can."""
    missing = [name for name in stage.needs if not importable(name)]
    missing += [name for name in stage.programs if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    for name in stage.after:
        state = found.get(name, {}).get("state", "ok")
        if state != "ok":
            return f"{name}: {state}"
    if left_s < stage.usual_s:
        return f"usually takes {stage.usual_s} s, {max(0, round(left_s))} s are left"
    return ""


def prepare(site: Path) -> dict[str, str]:
    """Install the wheels in .whl one by one; return the environment of all stages.

    Compiled modules are kept: where Python may not write beside its packages, each stage would
    compile all of torch and PyG again.
    """
    for wheel in sorted(WHEELS.glob("*.whl")):
        said = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade",
             "--disable-pip-version-check", "--target", str(site), str(wheel)],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        if said.returncode:
            print(f"FAIL {wheel.name} cannot be installed: {said.stderr.strip()[-300:]}")
    sys.path.insert(0, str(site))
    path = os.pathsep.join([str(ROOT), str(site), os.environ.get("PYTHONPATH", "")])
    told = {
        "PYTHONPATH": path.rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPYCACHEPREFIX": str(site.with_name("compiled")),
    }
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | told


def tell_missing(chosen: list[Stage]) -> None:
    """Print which wheels to bring along to have all stages run."""
    names = {name for stage in chosen for name in stage.needs if not importable(name)}
    if names:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        without = ", ".join(stage.name for stage in chosen if names & set(stage.needs))
        print(
            f"==> without {', '.join(sorted(names))} these are not run: {without}. Where there is "
            "a network: python3 -m pip download --no-deps --only-binary=:all: "
            f"--python-version {version} -d .whl {' '.join(sorted(names)).replace('_', '-')}"
        )


def importable(module: str) -> bool:
    """Return True when the stages can import the module."""
    importlib.invalidate_caches()
    return importlib.util.find_spec(module) is not None


def attempt(
    stage: Stage,
    limit_s: float,
    so_far: Callable[[], object],
    *,
    environment: dict[str, str],
    folder: Path,
) -> Found:
    """Run one stage to its end or its limit; call `so_far` while it runs."""
    print(f"\n==> {stage.name} (at most {limit_s:.0f} s): {stage.command}", flush=True)
    log = folder / f"{stage.name}.log"
    started = time.monotonic()
    code: int | None = None
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"ulimit -c 0; {stage.command}"], cwd=ROOT, env=environment, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        while code is None and (left_s := started + limit_s - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(left_s, _KEEP_EVERY_S))
            if code is None:
                so_far()
        if code is None:
            # Python's fault handler writes every thread's stack to the log.
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(_STACKS_S)
        # Processes that the stage left behind, too.
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
