"""Memory that large messages took goes back to the kernel."""

import subprocess
import sys
import threading

from bench.kit.result import ROOT
from serve.server.heap import HeapTrimmer

#: Prints the private memory in MiB: at first, with 96 MiB of small blocks that another thread has
#: taken and freed, and after looks of trimmers that may keep more than that, and less. Then with
#: such blocks once more, after three looks of the one that may keep more, and after four.
CODE = """
import ctypes, threading
from serve.commands.tuning import tune_process
from serve.ipc.private_memory import private_bytes
from serve.server.heap import HeapTrimmer

tune_process()
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.free.argtypes = [ctypes.c_void_p]

def take():
    last = [c.malloc(1024)]
    blocks = [c.malloc(1024) for _ in range(96 * 1024)]
    for block in blocks:
        ctypes.memset(block, 1, 1024)
    last.append(c.malloc(1024))  # what is freed is not at the heap's end
    for block in blocks:
        c.free(ctypes.c_void_p(block))

patient, strict = HeapTrimmer(keep_bytes=1 << 30), HeapTrimmer(keep_bytes=16 << 20)
seen = [private_bytes()]

def take_elsewhere():
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    seen.append(private_bytes())

take_elsewhere()
for trimmer in (patient, strict):
    trimmer.look()
    seen.append(private_bytes())
take_elsewhere()
for looks in (2, 1):
    for _ in range(looks):
        patient.look()
    seen.append(private_bytes())
print(*(one >> 20 for one in seen))
"""


def test_freed_memory_is_given_back_beyond_what_may_be_kept_and_the_rest_later():
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, *later = map(int, done.stdout.split())
    taken, kept, given_back, taken_again, kept_again, given_back_later = (
        one - first for one in later
    )
    assert min(taken, kept, taken_again, kept_again) > 80
    assert max(given_back, given_back_later) < 32


#: The same for what eight threads have taken at once and freed.
THREADS = """
import ctypes, threading
from serve.commands.tuning import tune_process
from serve.ipc.private_memory import private_bytes
from serve.server.heap import HeapTrimmer

tune_process()
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.free.argtypes = [ctypes.c_void_p]
all_have = threading.Barrier(8)

def take():
    blocks = [c.malloc(4096) for _ in range(6 * 1024)]
    for block in blocks:
        ctypes.memset(block, 1, 4096)
    all_have.wait()
    for block in blocks:
        c.free(ctypes.c_void_p(block))
    all_have.wait()

first, trimmer = private_bytes(), HeapTrimmer(keep_bytes=16 << 20)
threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
taken = private_bytes()
trimmer.look()
print(first >> 20, taken >> 20, private_bytes() >> 20)
"""


def test_what_many_threads_have_freed_is_given_back():
    """Each would have a heap of its own, of which the end is kept whatever is asked for."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, taken, given_back = map(int, done.stdout.split())
    assert taken - first > 150
    assert given_back - first < 32


def test_its_thread_ends():
    trimmer = HeapTrimmer(period_s=0.001)
    trimmer.start()
    trimmer.stop()
    trimmer.stop()
    assert "heap" not in {thread.name for thread in threading.enumerate()}
