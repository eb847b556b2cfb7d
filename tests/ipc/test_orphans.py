"""Whatever a process that adopts orphans has below it is ended with it."""

import subprocess
import sys

from bench.kit.waiting import PATIENCE_S

#: Makes chains of processes, each the child of the one before, in sessions of their own; ends those
#: below it; prints how many still run.
CHAINS = """
import os, signal, sys
from pathlib import Path
from serve.ipc.orphans import adopt_orphans, kill_children

def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

def chain(length):
    read, write = os.pipe()
    for _ in range(length):
        if os.fork():
            break
        os.setsid()
        os.write(write, b"%d\\n" % os.getpid())
    if os.getpid() != ours:
        signal.pause()
    told = b""
    while told.count(b"\\n") < length:
        told += os.read(read, 1000)
    os.close(read), os.close(write)
    return [int(pid) for pid in told.split()]

ours = os.getpid()
adopt_orphans()
left = 0
for _ in range(int(sys.argv[1])):
    spared, *others = chain(1) + chain(12)
    kill_children(ours, but={spared})
    left += sum(map(runs, others))
    assert runs(spared)
    kill_children(ours)
    left += runs(spared)
    for pid in (spared, *others):
        os.kill(pid, signal.SIGKILL)
    for _ in (spared, *others):
        os.wait()
print(left)
"""


def test_no_process_is_left_however_deep_it_is():
    found = subprocess.run(
        [sys.executable, "-c", CHAINS, "20"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (found.stdout.strip(), found.stderr) == ("0", "")
