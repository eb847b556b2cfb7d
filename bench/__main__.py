"""Run benches one after the other, or list them.

    python -m bench [--quick] [--list] [SCRIPT…]

Without names all run but those that need more than this machine has. Results go to bench/results;
then `python -m bench.pages` writes the pages that quote them.
"""

import argparse
import subprocess
import sys

from bench.registry import entries


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
    failed = 0
    for entry in entries():
        if options.list:
            print(f"{entry.script:28} {entry.question}")
        elif entry.script.split()[0] in options.scripts or not (options.scripts or entry.apart):
            failed += run(entry.script, options.quick) != 0
    return failed


def run(script: str, quick: bool) -> int:
    """Run one bench in a process of its own; return its exit code."""
    module, *question = script.split()
    print(f"==> {script}", flush=True)
    options = ["--quick"] if quick and module != "drawings" else []
    command = [sys.executable, "-m", f"bench.{module}", *question, *options]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
