"""Models that start processes or fill the disk: each has its bound, and no other notices."""

import shutil

import grpc
import pytest

from bench.kit.servers import ServerProcess
from tests.e2e import harm
from tests.e2e.harmed import (
    LANES,
    beside_others,
    graph,
    lanes_of,
    name_of,
    refusal,
    write_harmful,
)
from tests.e2e.support import REPOSITORY
from tests.processes import metric, wait_for

MAX_FILES = 64 << 20
CODE = grpc.StatusCode
FORKING = (harm.fork, harm.daemonise, harm.leave_a_program, harm.fork_without_end)
FILLING = (harm.fill_the_folder, harm.fill_files_without_names)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bounded")
    root = folder / "models"
    shutil.copytree(REPOSITORY / "gcn", root / "gcn")
    # A model that ends too many lanes is put aside.
    for name in ("harm", *map(name_of, FILLING)):
        write_harmful(root, name)
    device = {
        "lanes": LANES,
        "memory_budget": "1 GiB",
        "max_lane_files": f"{MAX_FILES >> 20} MiB",
        # Where models may write elsewhere, files have no limit of their own.
        "lane_writes": [],
    }
    with ServerProcess(folder, repository=root, sections={"device": device}) as found:
        yield found


@pytest.fixture
def call(bounded, reference):
    with beside_others(bounded, reference) as found:
        yield found
    wait_for(lambda: len(lanes_of(bounded)) == LANES, "the end of all but the lanes")


@pytest.mark.parametrize("deed", FORKING, ids=name_of)
def test_a_model_starts_no_process(call, deed):
    refused = refusal(call, "harm", graph(deed))
    assert (refused.code(), "PermissionError" in refused.details()) == (CODE.INTERNAL, True)


def test_threads_without_end_are_refused_when_their_stacks_take_the_memory_of_a_run(call):
    refused = refusal(call, "harm", graph(harm.start_threads_without_end))
    assert refused.code() in (CODE.INTERNAL, CODE.RESOURCE_EXHAUSTED), refused.details()


def test_one_large_file_is_refused(call):
    refused = refusal(call, "harm", graph(harm.write_one_large_file))
    assert (refused.code(), "File too large" in refused.details()) == (CODE.INTERNAL, True)


@pytest.mark.parametrize("deed", FILLING, ids=name_of)
def test_a_lane_whose_files_take_too_much_disk_is_replaced_and_they_are_gone(bounded, call, deed):
    before = metric(bounded, "gnnserve_lane_restarts_total")
    assert refusal(call, name_of(deed), graph(deed)).code() is CODE.UNAVAILABLE
    wait_for(lambda: metric(bounded, "gnnserve_lane_restarts_total") >= before + 2, "two lanes")
    assert "temporary files take" in bounded.log.read_text()
