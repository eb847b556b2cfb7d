"""Models that take more memory or time than they may: their own requests fail, and no other."""

import re
import shutil

import grpc
import pytest

from bench.kit.servers import ServerProcess
from tests.e2e import harm, liar
from tests.e2e.harmed import LANES, beside_others, graph, refusal, saying, write_harmful
from tests.e2e.support import REPOSITORY, infer
from tests.processes import metric, row, wait_for

MAX_MEMORY = 64 << 20
#: Code and further lines of `config.toml` of each model; gcn has none.
MODELS = {
    "glutton": (liar, f'max_memory = "{MAX_MEMORY >> 20} MiB"'),
    "harm": (harm, ""),
    "narrow": (harm, f'max_memory = "{MAX_MEMORY >> 20} MiB"'),
    "hasty": (harm, "max_run_s = 1.5"),
}


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limited")
    root = folder / "models"
    shutil.copytree(REPOSITORY / "gcn", root / "gcn")
    for name, (code, lines) in MODELS.items():
        write_harmful(root, name, code, lines=lines)
    sections = {"device": {"lanes": LANES, "memory_budget": "2 GiB"}}
    with ServerProcess(folder, repository=root, sections=sections) as found:
        yield found


@pytest.fixture
def call(limited, reference):
    with beside_others(limited, reference) as found:
        yield found


def test_tensors_beyond_what_a_model_may_take_are_refused_with_the_numbers(limited, call):
    refused = refusal(call, "glutton", saying(100.0), tenant="greedy")
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    words = rf"would pass its limit of (\d+) bytes; its model may take {MAX_MEMORY} \(model"
    (limit,) = map(int, re.search(words, refused.details()).groups())
    assert MAX_MEMORY - limit < 1 << 20, "the second run had all of it"
    assert row(limited, "tenant = ?", "greedy")["reason"] == "out_of_memory"


def test_what_a_model_may_take_is_there_for_a_run_that_needs_more_than_its_estimate(limited, call):
    infer(call, "glutton", saying(32.0), tenant="modest")
    told = row(limited, "tenant = ?", "modest")
    assert (told["status"], told["attempt"]) == ("OK", 2)
    assert told["pmc_measured_bytes"] >= 32 << 20


@pytest.mark.parametrize("model", ["harm", "narrow"])
def test_memory_that_is_not_torchs_is_bounded_too(call, model):
    refused = refusal(call, model, graph(harm.take_what_python_gets))
    assert refused.code() is grpc.StatusCode.INTERNAL
    (got_mib,) = map(int, re.search(r"got (\d+) MiB", refused.details()).groups())
    # Its tensors take next to nothing; see serve/lane/memory_bound.py.
    assert 128 <= got_mib <= 512 + 256


def test_a_model_that_takes_all_the_memory_it_gets_of_python_fails_alone(call):
    refused = refusal(call, "narrow", graph(harm.take_memory_of_python))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"its model may take {MAX_MEMORY}" in refused.details()


@pytest.mark.parametrize(
    "what", [harm.spin, harm.count_in_one_call], ids=lambda what: what.__name__
)
def test_a_run_that_takes_longer_than_its_model_may_is_stopped(limited, call, what):
    before = metric(limited, "gnnserve_lane_restarts_total")
    refused = refusal(call, "hasty", graph(what), tenant=what.__name__)
    assert refused.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    words = r"model hasty:1: its run took .* s, a run of it may take 1.5 s .*model.max_run_s"
    assert re.search(words, refused.details()), refused.details()
    assert row(limited, "tenant = ?", what.__name__)["reason"] == "time_limit"
    if what is harm.count_in_one_call:  # only the end of its process stops it
        wait_for(lambda: metric(limited, "gnnserve_lane_restarts_total") > before, "another lane")


def test_a_run_that_locks_up_in_c_is_ended_with_its_lane_and_repeated_once(limited, call):
    before = metric(limited, "gnnserve_lane_restarts_total")
    refused = refusal(call, "harm", graph(harm.lock_up_in_c), tenant="locked")
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    assert row(limited, "tenant = ?", "locked")["reason"] == "lane_lost"
    wait_for(lambda: metric(limited, "gnnserve_lane_restarts_total") >= before + 2, "two lanes")
