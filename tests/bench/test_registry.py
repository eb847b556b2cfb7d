"""The registry names every bench, result and page there is."""

import re
from collections import Counter

import pytest

from bench.kit.result import RESULTS, ROOT
from bench.registry import entries

BENCH = ROOT / "bench"
#: Run by another script.
CALLED = {
    "bench.kit.live_server",
    "bench.kit.echoes",
    "bench.models.forward_process",
    "bench.__main__",
    "bench.pages.__main__",
    "bench.peers.__main__",
}


def modules():
    for path in BENCH.rglob("*.py"):
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_script_is_registered():
    named = {f"bench.{entry.script.split()[0]}" for entry in entries()}
    apart = ("bench.gpu.", "bench.peers.", "bench.chaos.")
    parts = {name for name in modules() if name.startswith(apart)}
    assert set(modules()) - CALLED - parts == named - {
        "bench.peers",
        "bench.gpu.check",
        "bench.chaos",
    }


def test_every_result_is_registered_and_there_or_its_page_says_that_it_is_not():
    named = Counter(name for entry in entries() for name in entry.results)
    stored = {path.stem for path in RESULTS.glob("*.json")}
    assert stored <= set(named)
    assert set(named.values()) == {1}
    for entry in entries():
        page = (ROOT / entry.page).read_text(encoding="utf-8")
        for name in set(entry.results) - stored:
            assert f"Not measured yet: {name}.json" in page


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.script)
def test_the_page_names_the_script(entry):
    page = (ROOT / entry.page).read_text(encoding="utf-8")
    module = entry.script.split()[0].replace(".", "[./]")
    assert re.search(rf"bench[./]{module}", page.replace("\n", " "))
