"""What is done to a server under chaos, one thing at a time.

``FAULTS`` names each. A fault returns words about what it found, when it is over; what it needs of
the machine and does not have, it says.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

import numpy as np

from bench.chaos.attacks import Attacker
from bench.chaos.history import append
from bench.chaos.machine_faults import (
    Disk,
    fill_disk,
    freeze,
    kill_a_lane,
    limit_files,
    no_descriptors,
    no_threads,
    signalled,
    step_clock,
)
from bench.chaos.operator_faults import change_credentials, load_for_a_while, renew_certificate
from bench.chaos.outside import Outside
from bench.chaos.stepped_clock import SteppedClock
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
#: Length of a turn with a flood or without, after a time for what was before to be over.
_TURN_S, _SETTLES_S = 3.0, 1.0


class Faults:
    """All faults, for one life of the server."""

    def __init__(
        self,
        world: World,
        outside: Outside,
        seed: int,
        clock: SteppedClock | None = None,
        disk: Disk | None = None,
    ) -> None:
        """Without a clock or a disk of the server's own, what needs them says so."""
        self.world, self.outside = world, outside
        self.clock, self.disk = clock, disk
        self.random = random.Random(seed)
        server = outside.server
        self.attacker = Attacker(world, server.grpc_port, server.http_port)
        self.admin = Client(
            f"https://{server.target}",
            credentials=str(world.authority),
            token=world.admin,
            timeout_s=60.0,
        )

    def close(self) -> None:
        """Close the connection."""
        self.admin.close()

    def pid_of(self, kind: str) -> int | None:
        """Return the process of a lane, the fork server or the gateway."""
        if kind == "fork server":
            return self.outside.fork_server()
        if kind == "gateway":
            return self.outside.gateway()
        lanes = self.outside.lanes()
        return self.random.choice(lanes) if lanes else None


def _signalled(faults: Faults, kind: str, number: signal.Signals, resume_s: float = 0.0) -> str:
    pid = faults.pid_of(kind)
    if pid is None:
        return f"no {kind} now"
    signalled([pid], number, resume_s)
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
        said = kill_a_lane(faults.outside, faults.random)
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


def _no_descriptors(faults: Faults) -> str:
    """No file and no connection can be opened, and a lane ends meanwhile."""
    with no_descriptors(faults.outside):
        said = kill_a_lane(faults.outside, faults.random)
        faults.attacker.connections(20, hold_s=5.0)
    return said


def _flood(faults: Faults) -> str:
    """One tenant floods and does not, in turns, while all others send less than their share."""
    world = faults.world
    calm, flood = world.folder / "calm", world.folder / "flood"
    first = faults.random.randrange(2)
    calm.touch()
    try:
        for turn in range(first, first + 4):
            if turn % 2:
                flood.touch()
            time.sleep(_SETTLES_S)
            at = time.monotonic_ns()
            time.sleep(_TURN_S)
            end = time.monotonic_ns()
            flood.unlink(missing_ok=True)
            append(world.folder / "turns.jsonl", flood=bool(turn % 2), at=at, end=end)
    finally:
        flood.unlink(missing_ok=True)
        calm.unlink()
    return ""


def _quietly(attack: Callable[[Attacker], object]) -> Callable[[Faults], str]:
    return lambda faults: str(attack(faults.attacker) or "")


#: By name, in the order of a first round.
FAULTS: dict[str, Callable[[Faults], str]] = {
    "lane killed": lambda faults: kill_a_lane(faults.outside, faults.random),
    "lane stopped": lambda faults: _signalled(faults, "lane", signal.SIGSTOP),
    "lane frozen": lambda faults: _signalled(faults, "lane", signal.SIGSTOP, 0.5),
    "fork server killed": lambda faults: _signalled(faults, "fork server", signal.SIGKILL),
    "fork server frozen": lambda faults: _signalled(faults, "fork server", signal.SIGSTOP, 2.0),
    "gateway killed": lambda faults: _signalled(faults, "gateway", signal.SIGKILL),
    "gateway frozen": lambda faults: _signalled(faults, "gateway", signal.SIGSTOP, 2.0),
    "server frozen": lambda faults: freeze(faults.outside),
    "calibrator killed": _kill_calibrator,
    "unloaded": _unload,
    "loaded for a while": lambda faults: load_for_a_while(
        faults.world, faults.admin, faults.random
    ),
    "version rolled": _roll,
    "weights overwritten": _overwrite,
    "graph updated": _update_graph,
    "certificate renewed": lambda faults: renew_certificate(faults.world, faults.outside),
    "credentials changed": lambda faults: change_credentials(
        faults.world, faults.outside, faults.random
    ),
    "flood by a tenant": _flood,
    "half-open calls": _quietly(Attacker.half_open),
    "half a message": _quietly(Attacker.half_a_message),
    "resets": _quietly(Attacker.resets),
    "dripping": _quietly(Attacker.dripping),
    "garbage": _quietly(Attacker.garbage),
    "connections": _quietly(Attacker.connections),
    "16 MiB of empties": _quietly(Attacker.empties),
    "gzip bomb": _quietly(Attacker.gzip_bomb),
    "disk full": lambda faults: fill_disk(faults.disk),
    "files limited": lambda faults: limit_files(faults.outside),
    "no descriptors": _no_descriptors,
    "no threads": lambda faults: no_threads(faults.outside, faults.random),
    "clock forwards": lambda faults: step_clock(faults.clock, forwards=True),
    "clock backwards": lambda faults: step_clock(faults.clock, forwards=False),
}
#: Those that end or replace processes of the server.
ENDING = frozenset((
    "lane killed", "lane stopped", "fork server killed", "gateway killed", "calibrator killed",
    "unloaded", "loaded for a while", "version rolled", "weights overwritten", "no descriptors",
    "no threads",
))  # fmt: skip
