"""Run benches one after the other, or list them.

    python -m bench [--quick] [--list] [SCRIPT…]

Without names all run but those that need more than this machine has. Results go to bench/results;
then `python -m bench.pages` writes the pages that quote them. With `--quick` one more runs at once
than there are cores, as many wait at times, in processes that have torch already; what each says is
shown only if it fails.
"""

import argparse
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from bench.kit.result import ENVELOPE
from bench.registry import Entry, entries

#: Time after which a quick run is ended, on a busy machine.
QUICK_LIMIT_S = 1200.0


def main() -> int:
    """Return the number of benches that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="e.g. live.live")
    parser.add_argument("--quick", action="store_true", help="show that they work; no results")
    parser.add_argument("--list", action="store_true", help="list questions and scripts")
    options = parser.parse_args()
    known = [entry.script.split()[0] for entry in entries()]
    if unknown := set(options.scripts) - set(known):
        parser.error(f"no bench {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen = [
        entry
        for entry in entries()
        if entry.script.split()[0] in options.scripts or not (options.scripts or entry.apart)
    ]
    if options.list:
        for entry in entries():
            print(f"{entry.script:28} {entry.question}")
        return 0
    return run_quick(chosen) if options.quick else sum(run(entry) != 0 for entry in chosen)


def run(entry: Entry) -> int:
    """Run one bench in a process of its own; return its exit code."""
    print(f"==> {entry.script}", flush=True)
    module, *question = entry.script.split()
    command = [sys.executable, "-m", f"bench.{module}", *question]
    return subprocess.run(command, check=False).returncode


def run_quick(chosen: list[Entry]) -> int:
    """Run the quick profiles, several at once; return how many failed."""
    import torch_geometric  # noqa: F401  once, for all that are forked from here

    context = multiprocessing.get_context("fork")
    waiting = [entry for entry in chosen if entry.quick]
    running: list[tuple[Entry, float, BaseProcess]] = []
    failed = 0
    # Nothing is left running, also where this process is told to end.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        stack.callback(lambda: _end(*(process for _, _, process in running)))
        while waiting or running:
            while waiting and len(running) <= len(os.sched_getaffinity(0)):
                entry = waiting.pop(0)
                process = context.Process(target=_quick, args=(entry.script, folder))
                process.start()
                running.append((entry, time.monotonic(), process))
            # Some start themselves anew, which ends what a sentinel would wait for.
            time.sleep(0.1)
            for one in list(running):
                entry, started, ran = one
                took_s = time.monotonic() - started
                if ran.exitcode is not None or took_s > QUICK_LIMIT_S:
                    running.remove(one)
                    _end(ran)
                    failed += _told(entry, took_s, ran.exitcode, folder)
    return failed


def _quick(script: str, folder: Path) -> None:
    """Run a quick profile in this forked process, its output in the folder."""
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    module, *question = script.split()
    with (folder / f"{script}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = [module, *question, "--quick", "--out", str(folder / f"{script}.json")]
    runpy.run_module(f"bench.{module}", run_name="__main__", alter_sys=True)


def _end(*processes: BaseProcess) -> None:
    """End quick runs with all they started."""
    for process in processes:
        with suppress(ProcessLookupError):
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _told(entry: Entry, took_s: float, code: int | None, folder: Path) -> bool:
    """Print how a quick run went, and return True when it failed."""
    why = "" if code == 0 else f"exit code {code}"
    with suppress(OSError, ValueError):
        missing = ENVELOPE - json.loads((folder / f"{entry.script}.json").read_text()).keys()
        why = why or ", ".join(f"no {name} in the result" for name in sorted(missing))
    if not why and not (folder / f"{entry.script}.json").exists():
        why = "it wrote no result"
    print(f"{'FAILED' if why else 'ok':6} {took_s:6.1f} s  {entry.script}  {why}", flush=True)
    if why:
        print((folder / f"{entry.script}.log").read_text(errors="replace")[-8000:])
    return bool(why)


if __name__ == "__main__":
    raise SystemExit(main())
