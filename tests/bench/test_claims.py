"""Numbers in the sentences of pages are those of the results."""

import pytest

from bench.kit.result import ROOT, read_result
from bench.pages.models import regrets


def rows(name, **wanted):
    return [
        row
        for row in read_result(name)["rows"]
        if all(row[key] == value for key, value in wanted.items())
    ]


def goodput(system, workload="mix"):
    return rows("policies", system=system, workload=workload)[0]["goodput"]


def policies():
    slack, barrier, bound = map(goodput, ("slack+preemptive", "bqt+barrier", "bound"))
    yield f"carries {slack / barrier:.0f} times the load of `bqt` + `barrier`"
    yield f"reaches {slack / bound:.0%} of the lower bound's".replace("%", " %")
    yield f"instead of two raise goodput from {goodput('slack+preemptive, 2 lanes a core'):.2f} to"
    apart = 1 - goodput("slack+preemptive, a device for each core") / slack
    yield f"carries {100 * apart:.0f} % less than one device"
    yield f"simulate in {read_result('decisions')['million'][0]['cpu_s']:.0f} s on one core"


def executors():
    found = regrets("merging")
    yield f"takes {found['chosen'][0]:.3f} times as long as the best way measured"
    yield f"takes {found['never'][0]:.2f} times as long (worst {found['never'][1]:.2f})"
    yield f"always merging {found['always'][0]:.2f} times (worst {found['always'][1]:.2f})"


def estimates():
    found = read_result("pmc_accuracy")["all"]
    yield f"No run of {found['runs']:,} took more than its reserve"
    yield f"took {100 * found['need_share_of_reserve_max']:.1f} % of it"


def test_the_page_of_the_papers_claims_what_was_simulated():
    page = " ".join((ROOT / "docs/papers.md").read_text(encoding="utf-8").split())
    found = read_result("cognn")
    means = {row["device"]: row for row in found["ratios"] if row["queue"] == "mean"}
    low, high = means["fitted"], means["occupancy"]
    assert (
        f"[{low['jct']:.1f} and {low['qt']:.1f} to {high['jct']:.1f} and {high['qt']:.1f} times"
        in page
    )
    groups = found["groups"]
    counts = {policy: {row["count"] for row in groups if row["policy"] == policy}
              for policy in ("lmcf", "bmc")}  # fmt: skip
    assert counts == {"lmcf": {11}, "bmc": {10}}
    assert f"11 and 10, the largest {max(row['most_gib'] for row in groups):.1f} GiB" in page


@pytest.mark.parametrize("claims", [policies, executors, estimates])
def test_a_page_claims_what_was_measured(claims):
    path = ROOT / "docs" / "measurements" / f"{claims.__name__}.md"
    page = " ".join(path.read_text(encoding="utf-8").split())
    assert [claim for claim in claims() if claim not in page] == []


def test_the_readme_claims_what_was_measured():
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    means = {kind: of["all"]["geometric_mean"] for kind, of in
             read_result("executors")["ratios"].items()}  # fmt: skip
    assert f"{means['csr']:.2f} times as fast as stock PyG" in page
    assert f"{means['csr_compiled']:.2f} times with `models.compile`" in page
    costs = [row["mean_us"] for row in rows("decisions")]
    assert f"{min(costs):.0f} to {max(costs):.0f} µs" in page
    assert (
        f"never below the measured peak in {read_result('pmc_accuracy')['all']['runs']:,}" in page
    )
