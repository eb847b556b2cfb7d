"""bench/README.md lists every script and every result, and its links lead somewhere."""

import re

from bench.kit.result import RESULTS, ROOT

BENCH = ROOT / "bench"
README = (BENCH / "README.md").read_text(encoding="utf-8")
LINKS = set(re.findall(r"\]\(([^)]+)\)", README))
#: Scripts that another script starts.
CALLED = {"host/counted_server.py", "kit/live_server.py", "gpu"}
#: Tables and pictures made from the result of another script.
WRITERS = {"live/live_table.py", "scheduling/policies_table.py"}


def test_every_link_leads_to_a_file():
    assert [link for link in LINKS if not (BENCH / link).exists()] == []


def test_every_script_is_listed():
    scripts = {
        str(path.relative_to(BENCH))
        for path in BENCH.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    missing = {
        script
        for script in scripts - LINKS - CALLED - WRITERS
        if not script.startswith(("gpu/", "peers/"))
    }
    assert missing == set()


def test_every_result_is_listed():
    listed = {link.removeprefix("results/") for link in LINKS}
    variants = {"merging_csr.json", "live_eager.json"}  # of a script with another setting
    assert {path.name for path in RESULTS.glob("*.json")} - listed - variants == set()
