"""Measure how late small gRPC requests are while a hostile client attacks the server.

    python -m bench.host.attacked [--quick] [--rounds N]

A client asks the demo's GCN at a fixed pace, in turns alone and while another process attacks as
``bench.chaos.attacks`` does, again and again: with TLS, a token of another tenant, which has limits
(16 requests in the queue, 200 a second), and the addresses of this machine alone. Floods of whole
requests come by one connection. That process is in the kernel's idle class, and the server's lanes,
which usually are, have the lowest priority above it: its own work takes no time from the server's,
as if it ran on another machine. `over_alone` of an attack has the median of the
rounds' p99 beside it ÷ alone, with a 95 % bootstrap interval. A request that is not answered ends
the bench with its error.
"""

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.chaos.attacks import Attacker
from bench.chaos.world import World, make_world
from bench.host.json_beside import paced
from bench.kit.measure import in_turns, median_interval, percentiles, ratios
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from serve.client import Client

#: Names of attacks, how the attacker does them, and their full size.
ATTACKS: dict[str, tuple[str, dict[str, int]]] = {
    "connections that say nothing": ("connections", {"count": 5000}),
    "calls without a message": ("half_open", {"connections": 100, "calls": 200}),
    "messages without an end": ("half_a_message", {"connections": 100}),
    "calls that are reset": ("resets", {"calls": 20_000}),
    "clients that drip": ("dripping", {"connections": 100}),
    "TLS handshakes": ("handshakes", {"count": 5000}),
    "random bytes": ("garbage", {"connections": 100}),
    "16 MiB of empty tensors": ("empties", {}),
    "80 MiB of zeros in 80 KB": ("gzip_bomb", {}),
    "requests beyond its tenant's limits": ("beyond_its_limits", {"calls": 2000}),
    "wrong tokens": ("wrong_tokens", {"calls": 2000}),
}
#: `device.lane_niceness`: above that of the attacker, which has none.
_LANE_NICENESS = 19
SCRIPT = Script(
    "attacked",
    full={"rounds": 6, "seconds": 5.0, "rate": 50.0, "size": 1.0},
    quick={"rounds": 1, "seconds": 0.3, "rate": 20.0, "size": 0.01},
    tables=(
        Table(
            "latency of small gRPC requests, ms",
            "ways",
            {
                "beside": "{way}",
                "p50": "{p50}",
                "p99": "{p99}",
                "p99 ÷ alone": "{over_alone[0]:.2f} ({over_alone[1]:.2f} to {over_alone[2]:.2f})",
                "attacks": "{attacks}",
            },
        ),
    ),
)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return latencies alone and beside each attack, and the ratios of their p99."""
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        certificate, key = world.certificate
        sections: dict[str, dict[str, object]] = {
            "server.tls": {"certificate": str(certificate), "key": str(key)},
            "auth": {"tokens_file": str(world.folder / "tokens.toml")},
            "models": {"load": ["gcn"]},
            "device": {"lane_niceness": _LANE_NICENESS},
        }
        server = ServerProcess(Path(folder), repository=world.repository, sections=sections)
        victim = Client(server.target, credentials=world.authority, token=world.tokens[1])
        context = multiprocessing.get_context("spawn")
        attackers = ProcessPoolExecutor(1, context, _begin)
        with server, victim as client, attackers as attacker:
            ports = server.grpc_port, server.http_port
            attacker.submit(os.getpid).result()  # it has begun

            def beside(way: str) -> tuple[list[float], int]:
                if way not in ATTACKS:
                    return paced(client, options.rate, options.seconds), 0
                sizes = options.size, options.seconds
                count = attacker.submit(attack, world, ports, *ATTACKS[way], *sizes)
                return paced(client, options.rate, options.seconds), count.result()

            ways = {way: partial(beside, way) for way in ("nothing", *ATTACKS)}
            found = in_turns(ways, options.rounds, warm_up=0 if options.quick else 1)
    worst = {
        way: [float(np.percentile(latencies, 99)) for latencies, _ in rounds]
        for way, rounds in found.items()
    }
    return {
        "ways": [
            {
                "way": way,
                **percentiles(np.concatenate([one for one, _ in rounds]), (50, 99), 2),
                "over_alone": median_interval(ratios(worst[way], worst["nothing"])),
                "attacks": sum(count for _, count in rounds),
            }
            for way, rounds in found.items()
        ],
    }


def _begin() -> None:
    """Make this process the attacker's: it runs where nobody else would, with all descriptors."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def attack(
    world: World,
    ports: tuple[int, int],
    name: str,
    sizes: dict[str, int],
    size: float,
    seconds: float,
) -> int:
    """Attack for some seconds, again and again, with `size` of the full sizes; returns how often.

    The last attack is ended in full.
    """
    attacker, until = Attacker(world, *ports), time.monotonic() + seconds
    full = {key: max(1, int(value * size)) for key, value in sizes.items()}
    count = 0
    while time.monotonic() < until:
        getattr(attacker, name)(**full)
        count += 1
    return count


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
