"""Lanes that die, one after the other, leave nothing behind. RESTARTS=100 makes it long."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from bench.kit.servers import ServerProcess
from tests.e2e.support import Troubled, assert_equal, infer, raw_channel
from tests.processes import descendants, metric, shared_memory_names, wait_for

LANES, FIRST = 2, 4
RESTARTS = int(os.environ.get("RESTARTS", 14))
#: Fewer than the restarts that are compared.
SOME = 8
#: Runs that end well after each, or the model would be put aside.
WELL = 8


def temporary_folder(pid):
    """The server's own, by the file that it keeps locked there."""
    links = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            links.add(os.readlink(one))
    (lock,) = [link for link in links if link.endswith("/.in-use")]
    return Path(lock).parent


def held(server, folder):
    """What the server's main process has, and all its processes together."""
    process = Path(f"/proc/{server.pid}")
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "processes": len(descendants(server.pid)),
        "files": len([one for one in folder.rglob("*") if one.is_file()]),
        "folders": len(list(folder.glob("process-*"))),
        "shared memory": shared_memory_names(),
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_is_left_of_lanes_that_were_replaced(tmp_path):
    trouble = Troubled(tmp_path / "repository")
    sections = {"device": {"lanes": LANES}}
    with ServerProcess(tmp_path, repository=trouble.root, sections=sections) as server:
        folder = temporary_folder(server.pid)

        def all_up():
            wait_for(lambda: metric(server, "gnnserve_lanes_up") == LANES, "all lanes up")

        victims = set()
        with raw_channel(server) as call, ThreadPoolExecutor(1) as threads:
            for number in range(RESTARTS):
                if number == FIRST:
                    first = held(server, folder)
                with trouble.holding() as graph:
                    answer = threads.submit(infer, call, "mischief", graph)
                    victim = wait_for(trouble.running, "a run").pop()
                    os.kill(victim, signal.SIGKILL)
                    victims.add(victim)
                    wait_for(lambda victim=victim: trouble.running() - {victim}, "it runs again")
                assert_equal(answer.result().outputs["output"], trouble.expected(graph))
                for _ in range(WELL):
                    infer(call, "mischief", trouble.graph())
                all_up()
            assert len(victims) == RESTARTS
            last = held(server, folder)
        # Calls and the report take threads and files as they come; a leak would be one of each.
        for name in ("threads", "descriptors"):
            assert last.pop(name) < first.pop(name) + SOME, name
        assert last == first
    assert not folder.exists()
