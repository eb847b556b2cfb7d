"""What runs where: torch is in the lanes only, however much the server has done."""

import os
from contextlib import suppress
from pathlib import Path

from bench.kit.processes import descendants, http_get
from tests.e2e.support import GOOD, MODELS, assert_answers, infer


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_torch_is_loaded_by_lanes_only(server, call):
    for model in MODELS:
        infer(call, model, GOOD)
    assert http_get(server, "/report.json")[0] == 200
    assert_answers(server)
    assert "libtorch" not in libraries(server.pid)
    assert any("libtorch" in libraries(pid) for pid in descendants(server.pid))


def test_threads_that_serve_share_a_core_and_the_process_keeps_all(server, call):
    """Also those made later; lanes have cores of their own all the same."""
    infer(call, "gcn", GOOD)
    cores = os.sched_getaffinity(server.pid)
    threads = [int(entry.name) for entry in Path(f"/proc/{server.pid}/task").iterdir()]
    others = set()
    for thread in threads:
        if thread != server.pid:
            with suppress(ProcessLookupError):  # it has just ended
                others.add(tuple(os.sched_getaffinity(thread)))
    assert cores == os.sched_getaffinity(0)
    assert others == {tuple(sorted(cores)[: max(1, len(cores) // 8)])}
    lanes = [pid for pid in descendants(server.pid) if "libtorch" in libraries(pid)]
    assert set().union(*map(os.sched_getaffinity, lanes)) == cores
