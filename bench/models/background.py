"""What compiling in the background costs the requests that come meanwhile.

    python -m bench.models.background [--quick] [--rho 0.3] [--rounds N] [--requests N] [--seed S]

One open-loop trace through two servers in turn: one never compiles, the other has just started with
`models.compile = "background"` and nothing compiled yet, so it compiles while the trace runs. Both
have the same calibrations and targets (2 × solo times measured on a server that does not compile).
Only requests that ran on what both serve with count, so nothing of what compiling gains hides what
it costs; what was served by a compiled model is told beside it. Writes
bench/results/background.json, unless it is quick.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.kit.live_setup import Traces
from bench.kit.open_loop import LoadProcess, load_process
from bench.kit.result import RESULTS, write_result
from bench.kit.servers import ServerProcess
from bench.kit.solo import records, wait_for_rows
from serve.config import ModelsConfig

RESULT = RESULTS / "background.json"
KINDS: dict[str, bool | str] = {"never": False, "background": "background"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of 1,500 requests")
    parser.add_argument("--rho", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests = 1, 1_500
    with tempfile.TemporaryDirectory(prefix="gnnserve-background-") as name:
        folder = Path(name)
        cache = folder / "cache"
        cores = len(os.sched_getaffinity(0))
        traces = Traces(folder, "mix", options.requests, cores)
        with _server(folder / "solo", cache, False) as server:
            traces.measure(server, [options.seed])
        trace, path = traces.make(options.rho, options.seed)
        rows: list[dict[str, Any]] = []
        with load_process() as client:
            for turn in range(options.rounds):
                for kind in sorted(KINDS, reverse=bool(turn % 2)):
                    # Nothing compiled is there, whatever the turn before has made.
                    own = folder / f"{kind}-{turn}-cache"
                    shutil.copytree(cache, own)
                    with _server(folder / f"{kind}-{turn}", own, KINDS[kind]) as server:
                        rows.append({"kind": kind, "turn": turn} | _run(server, client, path))
                    print(rows[-1], flush=True)
    document = {
        "rho": options.rho,
        "requests_per_second": trace.header.rate_hz,
        "rows": rows,
        "together": {kind: _together([r for r in rows if r["kind"] == kind]) for kind in KINDS},
    }
    if not options.quick:
        write_result(RESULT, document)
    print(json.dumps(document["together"], indent=1))


def _server(folder: Path, cache: Path, compiles: bool | str) -> ServerProcess:
    folder.mkdir()
    return ServerProcess(
        folder,
        policy="slack",
        discipline="preemptive",
        sections={"models": {"cache": str(cache), "compile": compiles}},
        calibration_s=ModelsConfig().calibration_s,
    )


def _run(server: ServerProcess, client: LoadProcess, trace: Path) -> dict[str, Any]:
    """Send the trace; what became of it, by the server's own records."""
    run = client.run(trace, server.target)
    uids = [one.request_uid for one in run.seen if not one.error]
    wait_for_rows(server, len(uids))
    found = records(server.database)
    rows = [found[uid] for uid in uids]
    alike = sorted(
        row["latency_ns"] / row["qos_target_ns"] for row in rows if row["executor"] == "csr"
    )
    return {
        "seconds": round(run.elapsed_s, 1),
        "failed": len(run.seen) - len(uids),
        "requests": len(alike),
        "late": sum(over > 1 for over in alike),
        "p50_over_target": round(alike[len(alike) // 2], 3) if alike else None,
        "p99_over_target": round(alike[int(len(alike) * 0.99)], 3) if alike else None,
        "compiled_requests": len(rows) - len(alike),
        "compiled_late": sum(
            row["latency_ns"] > row["qos_target_ns"] for row in rows if row["executor"] != "csr"
        ),
    }


def _together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    requests, late = (sum(row[name] for row in rows) for name in ("requests", "late"))
    return {
        "requests": requests,
        "late": late,
        "late_share": round(late / max(1, requests), 4),
        "late_by_round": [row["late"] for row in rows],
        "p50_over_target": [row["p50_over_target"] for row in rows],
        "p99_over_target": [row["p99_over_target"] for row in rows],
    }


if __name__ == "__main__":
    main()
