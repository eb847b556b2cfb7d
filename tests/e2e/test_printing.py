"""What models print reaches the server's log, one JSON object a line, and nothing else does."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from bench.kit.servers import ServerProcess
from serve.models.writer import write_model
from tests.e2e import printing
from tests.e2e.support import REPOSITORY, Graph, assert_answers, infer, raw_channel
from tests.processes import descendants, metric, wait_for

BOTH = ["talks", "talks-too"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(REPOSITORY / "gcn", root / "gcn")
    torch.manual_seed(0)
    for name in BOTH:
        args = {"in_channels": 4, "out_channels": 2}
        made = printing.build(**args)
        path = write_model(root, name, made, factory="./model.py:build", args=args)
        shutil.copy(printing.__file__, path / "model.py")
    folder = tmp_path_factory.mktemp("talking")
    sections = {"device": {"lanes": 2, "memory_budget": "1 GiB"}}
    with ServerProcess(folder, repository=root, sections=sections) as found:
        yield found
    # Also what was printed at the end.
    assert found.stdout_lines == ("ready\n",)
    assert log_of(found)


def log_of(server) -> list[dict]:
    """The whole log, of which every line must be an object."""
    return [json.loads(line) for line in server.log.read_text().splitlines(keepends=True)
            if line.endswith("\n")]  # fmt: skip


def ask(server, model, deed) -> None:
    x = np.zeros((3, 4), np.float32)
    x[0, 0] = printing.FIRST + printing.DEEDS.index(deed)
    with raw_channel(server) as call:
        infer(call, model, Graph(x, np.zeros((2, 0), np.int64)))


def said(server, *wanted, after: int) -> list[dict]:
    """Lines with each of the texts, in the log's order, once all are there."""

    def look() -> list[dict] | None:
        lines = log_of(server)[after:]
        found = [line for line in lines if any(text in line["message"] for text in wanted)]
        return found if len(found) >= len(wanted) else None

    return wait_for(look, f"{wanted} in the log")


@pytest.fixture
def after(server):
    return len(log_of(server))


def of_model(model, stream="stdout", level="INFO", **more):
    return {"level": level, "logger": "output", "stream": stream, "model": f"{model}:1", **more}


def without_time(line):
    assert re.fullmatch(r"lane [01]", line["source"])
    return {key: value for key, value in line.items() if key not in ("time", "source")}


def test_what_is_printed_while_a_model_loads_has_its_name(server):
    found = [line for line in log_of(server) if line["message"] == "imported"]
    assert {line["model"] for line in found} == {f"{name}:1" for name in BOTH}
    assert {line["source"] for line in found} >= {"lane 0", "lane 1"}


@pytest.mark.parametrize("model", BOTH)
def test_prints_have_the_name_of_their_model(server, after, model):
    ask(server, model, printing.print_a_line)
    (line,) = said(server, "hello", after=after)
    assert without_time(line) == of_model(model, message="hello\tfrom Python")


def test_errors_are_warnings_of_the_log(server, after):
    ask(server, "talks", printing.print_an_error)
    (line,) = said(server, "lost", after=after)
    wanted = of_model("talks", "stderr", "WARNING", message="all is \x1b[31mlost")
    assert without_time(line) == wanted


def test_of_a_progress_bar_the_last_state_is_kept(server, after):
    ask(server, "talks", printing.print_progress)
    (line,) = said(server, "%", after=after)
    assert line["message"] == "100 %"


def test_python_warnings_are_warnings_of_the_log(server, after):
    ask(server, "talks", printing.warn)
    (line,) = said(server, "this is odd", after=after)
    assert (line["logger"], line["level"], line["model"]) == ("py.warnings", "WARNING", "talks:1")


def test_the_log_of_a_model_is_in_the_server_log(server, after):
    ask(server, "talks", printing.log)
    (line,) = said(server, "it failed", after=after)
    assert (line["logger"], line["level"], line["model"]) == ("my.model", "ERROR", "talks:1")
    assert "ValueError: two\nlines" in line["exception"]


def test_compiled_code_prints_to_the_log(server, after):
    ask(server, "talks", printing.write_from_c)
    first, second = said(server, "to a descriptor", "the C library", after=after)
    assert {first["stream"], second["stream"]} == {"stdout", "stderr"}


def test_a_model_that_prints_without_end_costs_the_log_little(server, after):
    before = metric(server, "gnnserve_log_lines_left_out_total")
    ask(server, "talks", printing.print_many_lines)
    assert_answers(server)

    def lines() -> int:
        return sum(line["logger"] == "output" for line in log_of(server)[after:])

    def left_out() -> float:
        return metric(server, "gnnserve_log_lines_left_out_total") - before

    wait_for(lambda: lines() + left_out() == printing.MANY, "an account of every line")
    assert lines() < printing.MANY / 10
    told = said(server, "lines were left out", after=after)
    counts = wait_for(
        lambda: [
            int(line["message"].split()[0])
            for line in said(server, "lines were left out", after=after)
        ],
        "counts",
    )
    assert told[0]["level"] == "WARNING"
    assert sum(counts) <= left_out()


def test_a_long_line_is_cut(server, after):
    ask(server, "talks", printing.print_a_long_line)
    long, short = said(server, "xxx", "after it", after=after)
    assert long["message"].rstrip("…").strip("x") == ""
    assert len(long["message"]) < 10_000
    assert short["message"] == "after it"


def test_what_is_no_text_is_told(server, after):
    ask(server, "talks", printing.write_no_text)
    first, *others = said(server, "text", "record", "level", after=after)
    assert first["message"] == r"no \xff\xfe text"
    assert {line["stream"] for line in others} == {"stderr"}


@pytest.mark.parametrize(
    ("deed", "last"),
    [(printing.abort_in_a_line, "half a li"), (printing.abort_in_c, "Assertion `1 == 2' failed")],
)
def test_the_last_words_of_a_lane_are_told(server, after, deed, last):
    with pytest.raises(grpc.RpcError):
        ask(server, "talks", deed)
    assert said(server, last, after=after)[0]["stream"] == "stderr"
    wait_for(lambda: metric(server, "gnnserve_lanes_up") == 2, "both lanes")


def test_the_gateway_that_is_killed_leaves_whole_lines(server, after):
    gateways = [
        pid
        for pid in descendants(server.pid)
        if "serve.rest.run" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    for pid in gateways:
        os.kill(pid, signal.SIGKILL)
    assert gateways
    said(server, "the HTTP gateway ended", after=after)
    wait_for(lambda: metric_or_none(server), "the gateway again")


def metric_or_none(server):
    try:
        return metric(server, "gnnserve_lanes_up")
    except AssertionError:
        return None
