"""What is done to a server under chaos, one thing at a time.

``FAULTS`` names each. A fault returns words about what it found, when it is over; what it needs of
the machine and does not have, it says.
"""

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import numpy as np

from bench.chaos.attacks import Attacker
from bench.chaos.outside import Outside
from bench.chaos.world import (
    CHANGED,
    GOOD,
    HELD,
    ROLLED,
    STATES,
    World,
    change_weights,
    held_features,
)
from gnnserve import Client, ClientError

#: A model that nobody asks, loaded with new weights each time so that it is calibrated.
_NEW = "new"
#: Control group of a server that may start no more threads.
PIDS = Path(f"/sys/fs/cgroup/pids/gnnserve-chaos-{os.getpid()}")


class Faults:
    """All faults, for one life of the server."""

    def __init__(self, world: World, outside: Outside, seed: int) -> None:
        self.world, self.outside = world, outside
        self.random = random.Random(seed)
        server = outside.server
        self.attacker = Attacker(world, server.grpc_port, server.http_port)
        self.admin = Client(
            f"https://{server.target}",
            credentials=str(world.authority),
            token=world.tokens[-1],
            timeout_s=60.0,
        )

    def close(self) -> None:
        """Close the connection."""
        self.admin.close()

    def pid_of(self, kind: str) -> int | None:
        """Return a lane's process, or the fork server's."""
        if kind == "fork server":
            return self.outside.fork_server()
        lanes = self.outside.lanes()
        return self.random.choice(lanes) if lanes else None


def _signalled(faults: Faults, kind: str, number: signal.Signals, resume_s: float = 0.0) -> str:
    pid = faults.pid_of(kind)
    if pid is None:
        return f"no {kind} now"
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        if resume_s:
            time.sleep(resume_s)
            os.kill(pid, signal.SIGCONT)
    return f"process {pid}"


def _kill_calibrator(faults: Faults) -> str:
    world = faults.world
    folder = world.repository / _NEW
    if not folder.exists():
        shutil.copytree(world.repository / "gin", folder)
    change_weights(world.weights(_NEW), faults.random.randrange(1 << 30))
    said = []

    def load() -> None:
        try:
            faults.admin.load(_NEW)
        except ClientError as error:
            said.append(f"{error.code} {error.message}")

    thread = Thread(target=load)
    thread.start()
    killed = 0
    give_up = time.monotonic() + 5
    while not killed and thread.is_alive() and time.monotonic() < give_up:
        for pid in faults.outside.calibrators():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        time.sleep(0.01)
    thread.join()
    return f"killed {killed}; the load said {said or 'nothing'}"


def _unload(faults: Faults) -> str:
    model = faults.random.choice(GOOD)
    faults.admin.unload(model)
    time.sleep(0.3)
    faults.admin.load(model)
    return model


def _roll(faults: Faults) -> str:
    model = faults.random.choice(ROLLED)
    folder = faults.world.repository / model / "2"
    if folder.exists():
        shutil.rmtree(folder)
    else:
        shutil.copytree(faults.world.later / model / "2", folder)
    faults.admin.load(model)
    return f"{model}: version 2 {'came' if folder.exists() else 'went'}"


def _overwrite(faults: Faults) -> str:
    """Other numbers in the weights' file for a while, in which a lane starts anew."""
    model = faults.random.choice(GOOD)
    path = faults.world.weights(model)
    before = path.read_bytes()
    try:
        change_weights(path, seed=3)
        said = _signalled(faults, "lane", signal.SIGKILL)
        time.sleep(1.0)
        os.truncate(path, len(before) // 2)
        time.sleep(0.5)
    finally:
        path.write_bytes(before)
    return f"{model}; {said}"


def _update_graph(faults: Faults) -> str:
    (graph,) = faults.admin.graphs(HELD)
    version = graph.version
    for _ in range(5):
        graph = faults.admin.update_graph(
            HELD,
            if_version=version,
            set_ids=np.arange(CHANGED),
            set_x=held_features((version + 1) % STATES),
        )
        version = graph.version
    return f"version {version}"


@contextmanager
def _limited(pid: int, what: int, most: int) -> Iterator[None]:
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)


def _disk_full(faults: Faults) -> str:
    """No file of the server grows, the report's database among them."""
    with _limited(faults.outside.server.pid, resource.RLIMIT_FSIZE, 4096):
        time.sleep(3.0)
    return ""


def _no_descriptors(faults: Faults) -> str:
    """No file and no connection can be opened, and a lane ends meanwhile."""
    pid = faults.outside.server.pid
    open_now = max(map(int, os.listdir(f"/proc/{pid}/fd")), default=0) + 1
    with _limited(pid, resource.RLIMIT_NOFILE, open_now):
        said = _signalled(faults, "lane", signal.SIGKILL)
        faults.attacker.connections(20, hold_s=2.0)
    return said


def _no_threads(faults: Faults) -> str:
    """No thread and no process can be started, and a lane ends meanwhile."""
    group = PIDS
    pid = faults.outside.server.pid
    try:
        group.mkdir(exist_ok=True)
        for one in (pid, *faults.outside.lanes(), faults.outside.fork_server()):
            (group / "cgroup.procs").write_text(str(one))
        (group / "pids.max").write_text((group / "pids.current").read_text())
    except OSError as error:
        return f"skipped: {error}"
    try:
        said = _signalled(faults, "lane", signal.SIGKILL)
        (group / "pids.max").write_text("1")
        time.sleep(3.0)
    finally:
        (group / "pids.max").write_text("max")
    return said


def _quietly(attack: Callable[[Attacker], object]) -> Callable[[Faults], str]:
    return lambda faults: str(attack(faults.attacker) or "")


#: By name, in the order of a first round.
FAULTS: dict[str, Callable[[Faults], str]] = {
    "lane killed": lambda faults: _signalled(faults, "lane", signal.SIGKILL),
    "lane stopped": lambda faults: _signalled(faults, "lane", signal.SIGSTOP),
    "fork server killed": lambda faults: _signalled(faults, "fork server", signal.SIGKILL),
    "fork server frozen": lambda faults: _signalled(faults, "fork server", signal.SIGSTOP, 2.0),
    "calibrator killed": _kill_calibrator,
    "unloaded": _unload,
    "version rolled": _roll,
    "weights overwritten": _overwrite,
    "graph updated": _update_graph,
    "half-open calls": _quietly(Attacker.half_open),
    "half a message": _quietly(Attacker.half_a_message),
    "resets": _quietly(Attacker.resets),
    "dripping": _quietly(Attacker.dripping),
    "garbage": _quietly(Attacker.garbage),
    "connections": _quietly(Attacker.connections),
    "16 MiB of empties": _quietly(Attacker.empties),
    "gzip bomb": _quietly(Attacker.gzip_bomb),
    "disk full": _disk_full,
    "no descriptors": _no_descriptors,
    "no threads": _no_threads,
}
