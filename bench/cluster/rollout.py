"""Restart two servers in turn and roll a version out, at 100 requests a second; count failures.

    python -m bench.cluster.rollout [--quick] [--rate 100] [--step-s 10]

Two real servers stand behind HAProxy (``gnnserve front``). The compiled load sender asks it for the
demo's GCN at equal distances, sends each request once and waits for its answer, through three
phases: nothing happens; each server is told to stop (SIGTERM) and started again, the second once
the first is back; and version 2 is loaded on both, gets a tenth of the requests as a canary, half
of them, all of them, and is rolled back. `p50_ms` to `longest_ms` are of the requests that were
due while the phase's steps went on. Asked: no request fails.
"""

import argparse
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench.kit.measure import percentiles
from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess, free_ports
from bench.kit.waiting import wait_for
from loadgen.native import NativeSender, Sent
from serve.client import Client
from serve.cluster.front import Front
from serve.native import front_lacks
from serve.wire.messages import decode_wire_response, encode_request

FEATURES, NODES, EDGES = 32, 100, 500
#: A server that is told to stop still serves as long: until the front has seen that it is to end.
DELAY_S = 5.0
LIMIT_S = 30.0
MODEL = "gcn"
SCRIPT = Script(
    "cluster_rollout",
    full={"rate": 100.0, "before_s": 60.0, "step_s": 10.0, "piece_s": 5.0},
    quick={"rate": 20.0, "before_s": 1.0, "step_s": 0.2, "piece_s": 0.5},
    tables=[
        Table("Two servers behind one front", "rows", {
            "meanwhile": "{phase}", "requests": "{requests:,}", "failed": "{failed}",
            "p50, ms": "{p50_ms:.2f}", "p99, ms": "{p99_ms:.2f}",
            "longest, ms": "{longest_ms:,.0f}", "steps took, s": "{steps_s:.0f}",
        })
    ],
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """The servers, the repository of each, the front, and what requests are."""

    servers: Sequence[ServerProcess]
    repositories: Sequence[Path]
    front: Front
    port: int
    message: bytes


def restart(site: Site, step_s: float) -> None:
    """Stop each server and start it again; it is back at the front before the next."""
    for server in site.servers:
        if server.stop() != 0:
            raise RuntimeError(f"a server did not stop in order:\n{server.log.read_text()}")
        server.start()
        server.wait_ready()
        wait_for(lambda: site.front.ready_count == len(site.servers), "the server to be back")
        time.sleep(step_s)


def roll_out(site: Site, step_s: float) -> None:
    """Load version 2 on all servers, give it more and more of the requests, and roll it back."""
    with ExitStack() as stack:
        admins = [stack.enter_context(Client(server.target)) for server in site.servers]

        def all_do(change: Callable[[Client], object]) -> None:
            for admin in admins:
                change(admin)
            time.sleep(step_s)

        all_do(lambda admin: admin.split(MODEL, {1: 100}))
        for repository in site.repositories:
            shutil.copytree(repository / MODEL / "1", repository / MODEL / "2")
        all_do(lambda admin: admin.load(MODEL))
        for percent in (10, 50):
            split = {1: 100 - percent, 2: percent}
            all_do(methodcaller("split", MODEL, split, canary=2))
        all_do(lambda admin: admin.split(MODEL, {2: 100}))
        all_do(lambda admin: admin.roll_back(MODEL))
        all_do(lambda admin: admin.split(MODEL, {1: 100}))
        taken_back = [admin.versions(MODEL)[0].taken_back for admin in admins]
        if any(taken_back):
            raise RuntimeError(f"the canary was taken back: {taken_back}")


class Load:
    """Sends requests at equal distances until it is told to end, in pieces of a few seconds.

    A piece begins once all of the one before have ended, so that none is left out.
    """

    def __init__(self, site: Site, rate: float, piece_s: float) -> None:
        self._sender = NativeSender(
            f"127.0.0.1:{site.port}", LIMIT_S, connections=2, whole_answers=True
        )
        self._messages = [site.message] * round(rate * piece_s)
        self._offsets_ns = [round(at / rate * 1e9) for at in range(len(self._messages))]
        self._over = threading.Event()
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._send)
        self.requests = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _send(self) -> None:
        try:
            while not self._over.is_set():
                self._sender.send_at(self._messages, self._offsets_ns)
                self.requests += len(self._messages)
        except Exception as error:
            self._fault = error

    def take(self) -> list[Sent]:
        """Return all requests of a load that has ended; raises what ended it."""
        if self._fault is not None:
            raise self._fault
        found = list(self._sender.take())
        if len(found) != self.requests:
            raise RuntimeError(f"{len(found)} of {self.requests} requests ended")
        return found


def phase(
    site: Site, name: str, options: argparse.Namespace, steps: Callable[[], None]
) -> dict[str, Any]:
    """Send while the steps go on; return a row about the requests."""
    with Load(site, options.rate, options.piece_s) as load:
        began_ns = time.monotonic_ns()
        steps()
        ended_ns = time.monotonic_ns()
    sent = load.take()
    failed = Counter(one.reply.status for one in sent if one.reply.status != "OK")
    during = [one for one in sent if one.due_ns <= ended_ns]
    latency_ms = np.array([(one.reply.done_ns - one.due_ns) / 1e6 for one in during])
    versions = Counter(
        decode_wire_response(one.answer).version for one in sent if one.reply.status == "OK"
    )
    found = percentiles(latency_ms, (50, 99), 2)
    return {
        "phase": name, "requests": len(sent), "failed": failed.total(), "failures": dict(failed),
        "during": len(during), "p50_ms": found["p50"], "p99_ms": found["p99"],
        "longest_ms": round(float(latency_ms.max()), 1),
        "steps_s": round((ended_ns - began_ns) / 1e9, 1),
        "by_version": dict(sorted(versions.items())),
    }  # fmt: skip


def site_in(folder: Path, stack: ExitStack) -> Site:
    """Start two servers, each with a repository of its own, and the front before them."""
    servers, repositories = [], []
    for name in ("first", "second"):
        own, repository = folder / name, folder / f"{name}-models"
        own.mkdir()
        shutil.copytree(ROOT / "configs" / "models" / MODEL, repository / MODEL)
        sections: dict[str, dict[str, object]] = {"server": {"shutdown_delay_s": DELAY_S}}
        server = ServerProcess(
            own, repository=repository, sections=sections, usual_calibrations=True
        )
        servers.append(stack.enter_context(server))
        repositories.append(repository)
    (port,) = free_ports(1)
    front = Front("127.0.0.1", port, [server.target for server in servers], folder)
    stack.callback(front.stop)
    front.start()
    wait_for(lambda: front.ready_count == len(servers) or front.failure, "both to be ready")
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "x": rng.standard_normal((NODES, FEATURES), np.float32),
        "edge_index": rng.integers(0, NODES, (2, EDGES)),
    }
    return Site(servers, repositories, front, port, encode_request(MODEL, tensors))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each phase."""
    if lacks := front_lacks():
        raise SystemExit(f"this bench needs the compiled sender: {lacks}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        site = site_in(folder, stack)
        phases: dict[str, Callable[[], None]] = {
            "nothing": lambda: time.sleep(options.before_s),
            "both restarted in turn": lambda: restart(site, options.step_s),
            "version 2 loaded, 10 %, 50 %, all, and back": lambda: roll_out(site, options.step_s),
        }
        rows = [phase(site, name, options, steps) for name, steps in phases.items()]
    return {"rate_hz": options.rate, "shutdown_delay_s": DELAY_S, "rows": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
