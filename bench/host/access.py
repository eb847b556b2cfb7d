"""Measure what encryption and a token cost a small request.

    python -m bench.host.access [--quick] [--starts N] [--rounds N]

Servers on the native front answer the same request of the demo's GCN, one at a time and in turns:
two without encryption, one with TLS, and one with TLS and a token. A client keeps its connection,
so handshakes are not in the latencies.

Two servers of one kind differ too: by where their memory lies, and by what shares their caches. In
one start of each that cannot be told from what a step costs. So all are started several times, in
an order drawn anew. Within a start, a step adds the median difference of neighbours in time:
`added_us_by_start`. `added_us` is the median of the starts, and `interval_us` its 95 % bootstrap
interval, which thus holds how much servers differ. The second plain server adds nothing, so the
interval of what it adds has to hold zero; its width is what this measurement cannot tell.

`server_us` is the processor time of the server's main process per request: what a step adds to it
is the server's, the rest the client's.
"""

import argparse
import random
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.measure import elapsed_us, in_turns, median_interval, percentiles
from bench.kit.processes import processor_ns
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from serve.access.tokens import Token, TokensFile, hash_of, new_token, write_tokens
from serve.client import Client
from serve.native import front_lacks, tls_lacks

FEATURES = 32
#: By connection: the one that it is compared with, and what may be added to that, µs.
STEPS: dict[str, tuple[str, float | None]] = {
    "plain, another server": ("plain", None),
    "TLS": ("plain", 60.0),
    "TLS and a token": ("TLS", 5.0),
}
SCRIPT = Script(
    "access",
    full={"starts": 12, "rounds": 1000, "nodes": 100},
    quick={"starts": 1, "rounds": 20, "nodes": 20},
    tables=[
        Table("Latency of a small request, µs", "rows", {
            "connection": "{way}", "p50": "{p50:,.0f}", "p99": "{p99:,.0f}",
            "server's processor": "{server_us:,.0f}", "added": "{added_us:,.1f}",
            "from": "{interval_us[0]:,.1f}",
            "to": "{interval_us[1]:,.1f}", "aim": "{aim_us:,.0f}",
        })
    ],
)  # fmt: skip


@contextmanager
def clients(orders: random.Random) -> Iterator[dict[str, tuple[Client, int]]]:
    """Yield a client and the main process of a new server of each kind, in a drawn order."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificate, key = own_certificate(folder)
        token = new_token()
        tokens = folder / "tokens.toml"
        row = Token(principal="bench", roles=("infer",), hash=hash_of(token))
        write_tokens(tokens, TokensFile(token=(row,)))
        tls: dict[str, object] = {"certificate": str(certificate), "key": str(key)}
        auth: dict[str, object] = {"tokens_file": str(tokens)}
        ways: dict[str, tuple[dict[str, dict[str, object]], str | None]] = {
            "plain": ({}, None),
            "plain, another server": ({}, None),
            "TLS": ({"server.tls": tls}, None),
            "TLS and a token": ({"server.tls": tls, "auth": auth}, token),
        }
        found = {}
        for number, way in enumerate(orders.sample(list(ways), len(ways))):
            sections, credential = ways[way]
            own = folder / str(number)
            own.mkdir()
            sections["server"] = {"front": "native", "admin_socket": str(own / "admin.sock")}
            sections["models"] = {"load": ["gcn"]}
            server = stack.enter_context(
                ServerProcess(own, sections=sections, usual_calibrations=True)
            )
            client = (
                Client(
                    f"https://localhost:{server.grpc_port}",
                    credentials=certificate,
                    token=credential,
                )
                if "server.tls" in sections
                else Client(server.target)
            )
            found[way] = stack.enter_context(client), server.pid
        yield found


def own_certificate(folder: Path) -> tuple[Path, Path]:
    """Return the files of a new certificate for localhost, signed by itself, and of its key."""
    certificate, key = folder / "server.crt", folder / "server.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate,
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def one_start(
    options: argparse.Namespace, orders: random.Random
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Start all servers once; returns latencies and the server's processor time, µs, by way."""
    tensors = {
        "x": np.zeros((options.nodes, FEATURES), np.float32),
        "edge_index": np.zeros((2, 5 * options.nodes), np.int64),
    }
    with clients(orders) as asked:
        ways = {
            way: partial(elapsed_us, client.infer, "gcn", **tensors)
            for way, (client, _) in asked.items()
        }
        in_turns(ways, max(1, options.rounds // 10), warm_up=0)
        before_ns = {way: processor_ns(pid) for way, (_, pid) in asked.items()}
        times = in_turns(ways, options.rounds, warm_up=0)
        spent_us = {
            way: (processor_ns(pid) - before_ns[way]) / 1e3 / options.rounds
            for way, (_, pid) in asked.items()
        }
    return times, spent_us


def rows_of(
    starts: Sequence[tuple[dict[str, list[float]], dict[str, float]]],
) -> list[dict[str, Any]]:
    """Return a row for each way, with what it adds to the one that it is compared with."""
    rows = []
    for way in ("plain", *STEPS):
        row: dict[str, Any] = {
            "way": way,
            **percentiles(np.concatenate([times[way] for times, _ in starts]), (5, 50, 99)),
            "server_us": round(float(np.median([spent[way] for _, spent in starts])), 1),
        }
        if way in STEPS:
            other, aim_us = STEPS[way]
            added = [float(np.median(np.subtract(times[way], times[other]))) for times, _ in starts]
            middle, *interval = median_interval(added, 1)
            row |= {"added_us": middle, "interval_us": interval}
            row["added_us_by_start"] = [round(one, 1) for one in added]
            if aim_us is not None:
                row["aim_us"] = aim_us
        rows.append(row)
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each way over all starts."""
    if lacks := front_lacks() or tls_lacks():
        raise SystemExit(f"this bench needs the native front with TLS: {lacks}")
    orders = random.Random(0)
    starts = [one_start(options, orders) for _ in range(options.starts)]
    return {"nodes": options.nodes, "starts": options.starts, "rows": rows_of(starts)}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
