"""Models that do harm: their own requests fail, and no other."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
import tritonclient.grpc

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
from tests.e2e.support import GOOD, REPOSITORY, assert_equal, infer
from tests.processes import http_get, is_running, metric, wait_for

CODE = grpc.StatusCode
#: Deeds that end their lane, which runs the request once more on another; each gets a model of its
#: own, as one that ends too many lanes is put aside.
FATAL = {
    harm.daemonise: CODE.UNAVAILABLE,
    harm.leave_a_program: CODE.UNAVAILABLE,
    harm.become_another_program: CODE.UNAVAILABLE,
    harm.end_itself_by_a_signal: CODE.UNAVAILABLE,
    harm.stop_itself: CODE.UNAVAILABLE,
    harm.close_descriptors: CODE.UNAVAILABLE,
    harm.write_nonsense: CODE.UNAVAILABLE,
}
#: Other deeds that fail.
REFUSED = {
    harm.kill_the_server: (CODE.INTERNAL, "PermissionError"),
    harm.kill_everybody: (CODE.INTERNAL, "PermissionError"),
    harm.trace_the_server: (CODE.INTERNAL, "PermissionError"),
    harm.connect: (CODE.INTERNAL, "PermissionError"),
    harm.return_too_few_rows: (CODE.INTERNAL, "rows"),
    harm.return_much: (CODE.INTERNAL, "rows"),
    harm.return_a_view_of_more: (CODE.INTERNAL, "out of bounds"),
    harm.return_nothing: (CODE.INTERNAL, "returned a object"),
    harm.return_a_sparse_tensor: (CODE.INTERNAL, "not dense (torch.sparse_coo)"),
    harm.return_a_scalar: (CODE.INTERNAL, "torch.float32 []"),
    harm.return_a_tensor_without_memory: (CODE.INTERNAL, "meta"),
    harm.recurse: (CODE.INTERNAL, "RecursionError"),
    harm.take_memory_of_torch: (CODE.RESOURCE_EXHAUSTED, "bytes"),
    harm.take_memory_of_python: (CODE.RESOURCE_EXHAUSTED, "memory"),
    harm.raise_exit: (CODE.INTERNAL, "SystemExit"),
    harm.raise_interrupt: (CODE.INTERNAL, "KeyboardInterrupt"),
    harm.raise_a_long_text: (CODE.INTERNAL, "long long"),
}
HARMLESS = [
    deed
    for deed in harm.DEEDS
    # The first has a test of its own, the second is for test_isolation.py.
    if deed not in {*FATAL, *REFUSED, harm.take_descriptors, harm.replace_functions}
    # For test_model_files.py, test_run_limits.py and test_harm_without_end.py.
    and deed not in harm.AT_FILES + harm.AT_LIMITS + harm.WITHOUT_END
]


class Repository:
    """`gcn`, the model `harm`, and copies of it by name for deeds that end lanes."""

    def __init__(self, folder) -> None:
        self.root = folder / "models"
        shutil.copytree(REPOSITORY / "gcn", self.root / "gcn")
        torch.manual_seed(0)
        module = harm.build()
        for name in ("harm", *map(name_of, FATAL)):
            write_harmful(self.root, name, module=module)
        self.folder = self.root / "harm"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return Repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def harmed(tmp_path_factory, repository):
    folder = tmp_path_factory.mktemp("harmed")
    # Runs of these models take microseconds: one that stands still is noticed within a second.
    # For processes that models leave behind; see test_harm_without_end.py for those without.
    device = {"lanes": LANES, "memory_budget": "1 GiB", "lane_processes": "on"}
    sections = {"device": device}
    with ServerProcess(folder, repository=repository.root, sections=sections) as found:
        yield found


@pytest.fixture
def call(harmed, reference):
    with beside_others(harmed, reference) as found:
        yield found


@pytest.mark.parametrize("deed", FATAL, ids=name_of)
def test_a_model_that_ends_its_lane_fails_alone(harmed, call, repository, deed):
    assert refusal(call, name_of(deed), graph(deed)).code() is FATAL[deed]
    left = [path for path in (repository.root / name_of(deed)).glob("[dp]*") if path.is_file()]
    for path in left:
        wait_for(lambda path=path: not is_running(int(path.read_text())), f"the end of {path}")
    if deed in (harm.daemonise, harm.leave_a_program):
        assert left
    wait_for(lambda: len(lanes_of(harmed)) == LANES, "the end of all but the lanes")


@pytest.mark.parametrize("deed", REFUSED, ids=name_of)
def test_what_a_model_may_not_do_fails_its_request(call, deed):
    refused = refusal(call, "harm", graph(deed))
    code, words = REFUSED[deed]
    assert (refused.code(), words in refused.details()) == (code, True), refused.details()
    # Its lane is as it was.
    answer = infer(call, "harm", graph())
    assert answer.outputs["output"].shape == (3, 2)


@pytest.mark.parametrize("deed", HARMLESS, ids=name_of)
def test_what_harms_nobody_is_answered(call, deed):
    assert infer(call, "harm", graph(deed)).outputs["output"].shape == (3, 2)
    again = [infer(call, "harm", graph()).outputs["output"] for _ in range(4)]
    for one in again[1:]:
        assert_equal(one, again[0])


def test_a_lane_whose_files_a_model_has_used_up_is_restarted(harmed, call):
    before = metric(harmed, "gnnserve_lane_restarts_total")
    assert refusal(call, "harm", graph(harm.take_descriptors)).code() is CODE.INTERNAL
    wait_for(lambda: metric(harmed, "gnnserve_lane_restarts_total") > before, "its restart")


def test_shared_settings_that_were_changed_are_counted_and_logged_once(harmed, call):
    def count():
        text = http_get(harmed, "/metrics")[1]
        name = 'gnnserve_settings_restored_total{model="harm"} '
        return float((name + "0 " + text).rpartition(name)[2].split()[0])

    before = count()
    for _ in range(2):
        infer(call, "harm", graph(harm.change_torch))
    wait_for(lambda: count() == before + 2, "both to be counted")
    said = "model harm:1 changed settings that all models share"
    assert harmed.log.read_text().count(said) == 1


def test_lanes_are_the_first_to_be_ended_when_memory_is_short(harmed, call):
    def score(pid):
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    assert {score(pid) for pid in lanes_of(harmed)} == {500}
    assert score(harmed.pid) < 500


def test_lanes_in_service_do_not_import_what_is_loaded(harmed, call, repository):
    """It is imported beside them, and waits here until somebody lets it go on."""
    before = lanes_of(harmed)
    barred = repository.folder / harm.BARRED
    (repository.folder / "importing").unlink(missing_ok=True)
    with (
        tritonclient.grpc.InferenceServerClient(harmed.target) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        client.unload_model("harm")
        barred.touch()
        try:
            loading = thread.submit(client.load_model, "harm")
            imports = repository.folder / "importing"
            wait_for(lambda: imports.exists() or loading.done(), "the import")
            assert not loading.done(), loading.result()
            for _ in range(20):
                infer(call, "gcn", GOOD)
            assert not loading.done()
            assert before <= lanes_of(harmed)
        finally:
            barred.unlink()
        loading.result()
    assert infer(call, "harm", graph()).outputs["output"].shape == (3, 2)
    wait_for(lambda: len(lanes_of(harmed)) == LANES, "the successors alone")
    assert lanes_of(harmed).isdisjoint(before)
    assert all(map(is_running, lanes_of(harmed)))


def test_the_deeds_are_all_tried():
    assert len(harm.DEEDS) >= 30
