"""Measure what encryption and a token cost a small request.

    python -m bench.host.access [--quick] [--rounds N]

Three servers on the native front answer the same request of the demo's GCN, one at a time and in
turns: without encryption, with TLS, and with TLS and a token. A client keeps its connection, so
handshakes are not in the latencies. What the second and third step add is the difference between
neighbours in time; `added_us` has its median, and `interval_us` the 95 % bootstrap interval of
that. `server_us` is the processor time of the server's main process per request: what a step adds
to it is the server's, the rest the client's.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
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
#: What is asked of each step, µs.
AIMS = {"TLS": 60.0, "TLS and a token": 5.0}
SCRIPT = Script(
    "access",
    full={"rounds": 5000, "nodes": 100},
    quick={"rounds": 20, "nodes": 20},
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
def clients() -> Iterator[dict[str, tuple[Client, int]]]:
    """Yield a client and the process of each server, each after what it is compared with."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificate, key = own_certificate(folder)
        token = new_token()
        tokens = folder / "tokens.toml"
        row = Token(principal="bench", roles=("infer",), hash=hash_of(token))
        write_tokens(tokens, TokensFile(token=(row,)))
        tls: dict[str, dict[str, object]] = {
            "server.tls": {"certificate": str(certificate), "key": str(key)}
        }
        ways: dict[str, tuple[dict[str, dict[str, object]], str | None]] = {
            "plain": ({}, None),
            "TLS": (dict(tls), None),
            "TLS and a token": ({**tls, "auth": {"tokens_file": str(tokens)}}, token),
        }
        found = {}
        for number, (way, (sections, credential)) in enumerate(ways.items()):
            own = folder / str(number)
            own.mkdir()
            sections["server"] = {"front": "native", "admin_socket": str(own / "admin.sock")}
            sections["models"] = {"load": ["gcn"]}
            server = stack.enter_context(
                ServerProcess(own, sections=sections, usual_calibrations=True)
            )
            target = server.target
            if "server.tls" in sections:
                target = f"https://localhost:{server.grpc_port}"
            client = stack.enter_context(
                Client(target, credentials=certificate, token=credential)
                if credential or "server.tls" in sections
                else Client(target)
            )
            found[way] = client, server.pid
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row for each way, with what it adds to the one before."""
    if lacks := front_lacks() or tls_lacks():
        raise SystemExit(f"this bench needs the native front with TLS: {lacks}")
    tensors = {
        "x": np.zeros((options.nodes, FEATURES), np.float32),
        "edge_index": np.zeros((2, 5 * options.nodes), np.int64),
    }
    with clients() as asked:
        ways = {
            way: partial(elapsed_us, client.infer, "gcn", **tensors)
            for way, (client, _) in asked.items()
        }
        in_turns(ways, max(1, options.rounds // 20), warm_up=0)
        before_ns = {way: processor_ns(pid) for way, (_, pid) in asked.items()}
        times = in_turns(ways, options.rounds, warm_up=0)
        spent_us = {
            way: (processor_ns(pid) - before_ns[way]) / 1e3 / options.rounds
            for way, (_, pid) in asked.items()
        }
    rows, before = [], None
    for way, taken in times.items():
        row: dict[str, Any] = {"way": way, **percentiles(taken, (5, 50, 99))}
        row["server_us"] = round(spent_us[way], 1)
        if before is not None:
            added = np.array(taken) - np.array(before)
            middle, *interval = median_interval(added, 1)
            row |= {"added_us": middle, "interval_us": interval, "aim_us": AIMS[way]}
        rows.append(row)
        before = taken
    return {"nodes": options.nodes, "rows": rows}


if __name__ == "__main__":
    SCRIPT.main(measure, __doc__)
