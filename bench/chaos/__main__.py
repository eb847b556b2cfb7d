"""Does to a server what a bad day would do, and has what comes of it checked.

    python -m bench.chaos --seconds 60
    python -m bench.chaos --requests 100000 --restarts 2 --parts 10 --folder /tmp/chaos

A real server with TLS, tokens of eight tenants and a held graph gets requests of all kinds from
client processes, while about every second something is done to it (``faults``). All is recorded;
``checker`` then says what held. Exits with 1 when something did not.

A long run is divided into parts, each with a server, a record and a check of its own. In every
second part nothing ends a process of the server, as only long lives tell of leaks. In a folder that
holds some parts already, the others are run. ``total`` adds up what the parts found.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from bench.chaos.client import FLOOD, LONG_LIVES
from bench.chaos.faults import ENDING, FAULTS, Faults
from bench.chaos.history import append
from bench.chaos.machine_faults import PIDS, Disk, Violated
from bench.chaos.outside import Outside
from bench.chaos.stepped_clock import SteppedClock
from bench.chaos.world import HELD, World, make_world
from bench.kit.beside import beside
from bench.kit.processes import descendants
from bench.kit.result import ROOT, envelope
from bench.kit.servers import ServerProcess
from bench.kit.waiting import PATIENCE_S, wait_for

#: Clients that send requests of all kinds; another one floods.
CLIENTS = 2
LANES = 2
#: How each life of the server in turn decides what runs.
SCHEDULING = (("slack", "preemptive"), ("sqtf", "rolling"), ("bqt", "barrier"))
#: Share of the run after which the server's first life may end: only long lives tell of leaks.
FIRST_LIFE = 0.6
DRAIN_S = 30.0
#: The scheduler's journal of the present life; those of earlier ones have their number before it.
JOURNAL = "scheduler.journal"
#: What the checker writes of a run; it marks a part that has been run.
VERDICT = "verdict.json"
#: Time between two faults.
PAUSE_S = 0.3
#: Who sleeps this long and wakes so much later was stopped, or had no processor.
BEAT_S, STILL_S = 0.5, 3.0
#: What a server holds for requests, with its metric: nothing at the end.
HELD_AT_THE_END = {
    "reserved_bytes": "gnnserve_memory_reserved_bytes",
    "staged_bytes": "gnnserve_pool_used_bytes",
    "waiting": "gnnserve_queue_depth",
    "inside": "gnnserve_requests_inside",
}
#: Longest time for what was refused, held or lost to be over at the end.
CALM_S = 2 * PATIENCE_S


class Lives:
    """The server through its lives: started, killed, stopped; each is recorded."""

    def __init__(
        self,
        world: World,
        server: ServerProcess,
        seed: int,
        clock: SteppedClock | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.world, self.server = world, server
        self._clock, self._disk = clock, disk
        self._seed = seed
        self._ready_ns = 0
        self._logs = 0
        #: Messages that each life's transport has counted, by process id.
        self.calls: dict[int, float] = {}
        #: Processes of all lives that did not end.
        self.left: list[int] = []
        self.outside: Outside
        self.faults: Faults

    def begin(self) -> None:
        """Start it, configured a little otherwise each time, and wait until it is ready."""
        policy, discipline = SCHEDULING[self._logs % len(SCHEDULING)]
        text = self.server.config.read_text()
        text = re.sub("(?m)^policy = .*", f'policy = "{policy}"', text)
        text = re.sub("(?m)^discipline = .*", f'discipline = "{discipline}"', text)
        self.server.config.write_text(text)
        self.server.start()
        self.server.wait_ready()
        self._ready_ns = time.monotonic_ns()
        self._seed += 1
        self.outside = Outside(self.world, self.server)
        self.faults = Faults(self.world, self.outside, self._seed, self._clock, self._disk)

    def end(self, how: str) -> None:
        """Kill it, or stop it as asked; all of its processes have ended then."""
        self.faults.close()
        self.outside.close()
        below = set(descendants(self.server.pid))
        at = time.monotonic_ns()
        process = self.server.process
        assert process is not None
        if process.poll() is not None:
            how, code = "died", process.returncode
        elif how == "killed":
            self.server.kill()
            code = -signal.SIGKILL
        else:
            code = self.server.stop()
        self.left += _left(below)
        append(
            self.world.folder / "lives.jsonl",
            ready=self._ready_ns, ended=at, how=how, code=code, pid=self.server.pid,
            took=time.monotonic_ns() - at,
        )  # fmt: skip
        self._logs += 1
        self.server.log.rename(self.world.folder / f"server-{self._logs}.log")
        journal = self.world.folder / JOURNAL
        if journal.exists():
            journal.rename(self.world.folder / f"{self._logs}-{JOURNAL}")

    @property
    def has_died(self) -> bool:
        """True when it has ended by itself."""
        assert self.server.process is not None
        return self.server.process.poll() is not None


def _left(pids: set[int]) -> list[int]:
    """Return those that still run after a while."""

    def running() -> list[int]:
        found = []
        for pid in pids:
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue
            if stat.rpartition(")")[2].split()[0] not in "ZX":
                found.append(pid)
        return found

    give_up = time.monotonic() + 60
    while running() and time.monotonic() < give_up:
        time.sleep(0.1)
    return running()


@contextmanager
def clients(
    world: World, target: str, requests: int, rate: float, seed: int
) -> Iterator[Callable[[], bool]]:
    """Run the clients; yields what tells whether one is still at it, and ends them."""
    command = [sys.executable, "-m", "bench.chaos.client", str(world.folder)]
    processes = []
    try:
        for number in (*range(CLIENTS), FLOOD):
            arguments = [str(number), str(seed), target, str(requests // CLIENTS)]
            arguments.append(str(rate / CLIENTS))
            processes.append(subprocess.Popen([*command, *arguments], cwd=ROOT))
        for number in (*range(CLIENTS), FLOOD):
            ready = world.folder / f"client-{number}.ready"
            wait_for(lambda ready=ready: ready.exists(), f"client {number} begins")  # type: ignore[misc]
        yield lambda: any(one.poll() is None for one in processes[:CLIENTS])
        (world.folder / "stop").touch()
        for one in processes:
            code = one.wait(2 * PATIENCE_S)
            assert code == 0, f"a client ended with {code}"
    finally:
        for one in processes:
            one.kill()
            one.wait()


@contextmanager
def watched(lives: Lives, yield_to: Path | None) -> Iterator[None]:
    """Record a sample of the server about once a second; clients pause while a file exists."""
    pause = lives.world.folder / "pause"

    def watch(over: threading.Event) -> None:
        while not over.wait(1.0):
            if yield_to is not None and yield_to.exists():
                pause.touch()
            else:
                pause.unlink(missing_ok=True)
            outside = lives.outside
            try:
                sample = outside.sample()
            except Exception:  # its server has ended meanwhile
                continue
            if outside is lives.outside:
                append(lives.world.folder / "samples.jsonl", **sample)
                if sample["calls"] is not None:
                    lives.calls[sample["pid"]] = sample["calls"]

    try:
        with beside(watch):
            yield
    finally:
        pause.unlink(missing_ok=True)


@contextmanager
def heartbeat(world: World) -> Iterator[None]:
    """Record when this process did not run: then the machine stood still, or others had it."""

    def beat(over: threading.Event) -> None:
        at = time.monotonic_ns()
        while not over.wait(BEAT_S):
            now = time.monotonic_ns()
            if now - at > (BEAT_S + STILL_S) * 1e9:
                append(world.folder / "stills.jsonl", at=at, end=now)
            at = now

    with beside(beat):
        yield


def disturb(lives: Lives, options: argparse.Namespace, busy: Callable[[], bool], seed: int) -> None:
    """Do one thing after the other to the server, each once before any is done again."""
    dice = random.Random(seed)
    began = time.monotonic()
    rounds: list[str] = []
    names = options.only.split(",") if options.only else list(FAULTS)
    if options.long_lives:
        names = [name for name in names if name not in ENDING]
    most_restarts = 0 if options.long_lives else options.restarts
    restarts = 0

    def share() -> float:
        """Return how much of the run is over, starts apart."""
        sent = sum(lives.calls.values()) / (options.requests or 1 << 40)
        over: float = (time.monotonic() - began) / options.seconds
        return max(sent, over)

    while busy() and share() < 1:
        time.sleep(PAUSE_S)
        began += paused(lives.world)
        at_share = FIRST_LIFE + (1 - FIRST_LIFE) * restarts / max(most_restarts, 1)
        if restarts < most_restarts and share() > at_share:
            restarts += 1
            how = "stopped" if restarts % 4 == 2 else "killed"
            print(f"the server is {how}", flush=True)
            at = time.monotonic()
            lives.end(how)
            lives.begin()
            began += time.monotonic() - at
            continue
        if lives.has_died:
            break
        if not rounds:
            rounds = dice.sample(names, len(names))
        name = rounds.pop()
        with recorded(lives.world, name) as said:
            said.append(FAULTS[name](lives.faults))


def paused(world: World) -> float:
    """Wait while clients pause; returns the time in s."""
    at = time.monotonic_ns()
    while (world.folder / "pause").exists():
        time.sleep(0.5)
    end = time.monotonic_ns()
    if end - at > 1e9:
        append(world.folder / "pauses.jsonl", at=at, end=end)
    return (end - at) / 1e9


@contextmanager
def recorded(world: World, name: str) -> Iterator[list[str]]:
    """Record a fault, with what is put into the list, or the error in which it ended."""
    said: list[str] = []
    at = time.monotonic_ns()
    try:
        yield said
    except Violated as error:
        said[:] = [f"violated: {error}"]
    except Exception as error:  # a fault may fail, as the server is meant to be in trouble
        said[:] = [f"failed: {type(error).__name__} {error}"]
    finally:
        end = time.monotonic_ns()
        append(world.folder / "faults.jsonl", name=name, at=at, end=end, said="".join(said))
        print(f"{(end - at) / 1e9:6.1f} s  {name}  {''.join(said)}", flush=True)


def calm(lives: Lives) -> dict[str, Any]:
    """Wait until the server holds nothing more; returns what it holds then, or after a while."""
    wanted = dict.fromkeys(HELD_AT_THE_END.values(), 0.0)
    lives.outside.forget_regions()
    give_up = time.monotonic() + CALM_S
    last, metrics = -1.0, lives.outside.metrics(10.0)
    while time.monotonic() < give_up and not lives.has_died:
        metrics = lives.outside.metrics(10.0)
        up = metrics.get("gnnserve_lanes_up")
        now = lives.outside.sample()["calls"]
        if up == LANES and now == last and all(metrics.get(k) == v for k, v in wanted.items()):
            break
        last = now if now is not None else -1.0
        time.sleep(2.0)
    return {
        "calls": last,
        "own calls": metrics.get("gnnserve_own_calls_total"),
        "lanes": LANES,
        "lanes_up": metrics.get("gnnserve_lanes_up"),
        "regions": lives.outside.regions(),
        "copies of models that are not served": (
            lives.outside.copies() - lives.outside.copies_of_served()
        ),
        **{name: metrics.get(metric) for name, metric in HELD_AT_THE_END.items()},
    }


def run(folder: Path, options: argparse.Namespace, seed: int) -> int:
    """Run, and have it checked; returns the checker's exit code."""
    folder = folder.resolve()  # a server takes the paths in its configuration from that file's
    folder.mkdir(parents=True, exist_ok=True)
    world = make_world(folder)
    world.scratch.mkdir()
    if options.long_lives:
        (folder / LONG_LIVES).touch()
    with ExitStack() as stack:
        clock = disk = None
        with suppress(OSError, subprocess.CalledProcessError):
            clock = SteppedClock(folder)
        with suppress(OSError):
            disk = Disk(folder / "database")
            stack.callback(disk.close)
        server = _server(world, folder / JOURNAL if options.journal else None, clock)
        if disk is not None:
            server.database = disk.folder / "report.db"
            text = server.config.read_text()
            server.config.write_text(text.replace(str(folder / "report.db"), str(server.database)))
        stack.callback(server.kill)
        lives = Lives(world, server, seed, clock, disk)
        lives.begin()
        stack.enter_context(watched(lives, options.yield_to))
        stack.enter_context(heartbeat(world))
        requests = options.requests or 1 << 40
        with clients(world, server.target, requests, options.rate, seed) as busy:
            disturb(lives, options, busy, seed)
        end = calm(lives)
        lives.end("stopped")
        if disk is not None:
            for file in disk.folder.glob(
                "report.db*"
            ):  # one that was ended by force leaves its log
                shutil.copy(file, folder)
    with suppress(OSError):  # it may never have been made
        PIDS.rmdir()
    end["processes left"] = len(lives.left)
    end["shared memory left"] = len(list(Path("/dev/shm").glob(f"{world.region_name}*")))
    end["files left"] = sum(len(files) for _, _, files in os.walk(world.scratch))
    end["tracebacks"] = _tracebacks(folder)
    journals = sorted(folder.glob(f"*-{JOURNAL}"))
    end["journals"] = {path.name: _replayed(path) for path in journals}
    end["alone"] = options.alone
    end["drain_s"] = DRAIN_S
    end["seed"] = seed
    end["long_lives"] = options.long_lives
    end |= envelope()
    (folder / "end.json").write_bytes(msgspec.json.encode(end))
    checker = [sys.executable, "-m", "bench.chaos.checker", str(folder)]
    return subprocess.run(checker, cwd=ROOT).returncode


def _server(world: World, journal: Path | None, clock: SteppedClock | None) -> ServerProcess:
    certificate, key = world.certificate
    return ServerProcess(
        world.folder,
        repository=world.repository,
        sections={
            "server": {
                "max_queue": 64,
                "drain_timeout_s": DRAIN_S,
                "max_run_s": 20.0,
                "start_timeout_s": 60.0,
            },
            "server.tls": {"certificate": str(certificate), "key": str(key)},
            "auth": {"tokens_file": str(world.folder / "tokens.toml"), "admin_on_port": True},
            "device": {"lanes": LANES},
            "report": {"journal": str(journal)} if journal else {},
        },
        graphs=({"name": HELD, "file": str(world.folder / "held.npz")},),
        environment={"TMPDIR": str(world.scratch), **(clock.environment if clock else {})},
    )


def _tracebacks(folder: Path) -> list[str]:
    """Return where the main process tells of exceptions that it did not expect.

    Lanes write those of the misbehaving model, as plain text.
    """
    return [
        f"{path.name}:{number}"
        for path in sorted(folder.glob("server-*.log"))
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if line.startswith("{") and '"exception":' in line
    ]


def _replayed(journal: Path) -> str:
    """Return what is said when a fresh scheduler does not decide as the journal has it.

    A server that was killed leaves a line that has no end.
    """
    whole, _, rest = journal.read_bytes().rpartition(b"\n")
    if rest:
        journal.write_bytes(whole + b"\n")
    command = [sys.executable, "-m", "serve", "simulate", "--journal", str(journal)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-500:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=1e9, help="how long, at most")
    parser.add_argument("--requests", type=int, default=0, help="how many, at most; 0: any number")
    parser.add_argument("--rate", type=float, default=0, help="requests a second, at most; 0: any")
    parser.add_argument("--yield-to", type=Path, help="a file: nothing is done while it exists")
    parser.add_argument("--restarts", type=int, default=2, help="ends of the main process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of faults, by commas")
    parser.add_argument("--parts", type=int, default=1, help="how many runs, seeds from --seed on")
    parser.add_argument("--folder", type=Path, help="empty; default: one that is removed")
    parser.add_argument(
        "--long-lives", action="store_true", help="nothing ends a process of the server"
    )
    parser.add_argument("--journal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--alone", action="store_true", help="nothing else runs: judge times too")
    options = parser.parse_args()
    if options.seconds >= 1e9 and not options.requests:
        parser.error("--seconds or --requests")
    ServerProcess.lane_niceness = 0
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        if options.parts == 1:
            sys.exit(run(folder, options, options.seed))
        failed = 0
        always = options.long_lives
        for seed in range(options.seed, options.seed + options.parts):
            part = folder / f"part-{seed}"
            if (part / VERDICT).exists():
                continue
            shutil.rmtree(part, ignore_errors=True)
            options.long_lives = always or seed % 2 == 1
            print(f"part {seed}{', of long lives' * options.long_lives}", flush=True)
            failed += run(part, options, seed) != 0
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
