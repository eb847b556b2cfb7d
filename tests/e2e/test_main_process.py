"""Torch is loaded by lanes only, whatever the server has done."""

from pathlib import Path

from tests.e2e.support import GOOD, MODELS, assert_answers, infer
from tests.processes import descendants, http_get


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_torch_is_loaded_by_lanes_only(server, call):
    for model in MODELS:
        infer(call, model, GOOD)
    assert http_get(server, "/report.json")[0] == 200
    assert_answers(server)
    assert "libtorch" not in libraries(server.pid)
    assert any("libtorch" in libraries(pid) for pid in descendants(server.pid))
