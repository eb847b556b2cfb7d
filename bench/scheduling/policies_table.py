"""The tables of docs/measurements/policies.md, from what the benches wrote.

    python -m bench.scheduling.policies_table

Replaces what stands between the markers; `tests/bench` checks that page and results agree.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.kit.page import markdown, placed
from bench.kit.result import DOCS_PATH, read_result

PAGE = DOCS_PATH / "measurements" / "policies.md"
RHOS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.5)
OURS = "slack+preemptive"
#: System of ``bench.scheduling.policies`` and how the page calls it.
SYSTEMS = {
    "bound": "nobody can do better",
    OURS: "`slack` + `preemptive`, 4 lanes a core (default)",
    f"{OURS}, 8 lanes a core": "the same, 8 lanes a core",
    f"{OURS}, 2 lanes a core": "the same, 2 lanes a core",
    f"{OURS}, merging": "the same, 4 lanes, merging",
    f"{OURS}, a device for each core": "the same, 4 lanes, a device for each core",
    "sqtf+preemptive": "`sqtf` + `preemptive`",
    "bqt+preemptive": "`bqt` + `preemptive`",
    "mps_base": "`mps_base`",
    "slack+rolling": "`slack` + `rolling`",
    "bqt+barrier": "`bqt` + `barrier`",
    "default": "`default`",
}
WINDOWS = {
    OURS: "adaptive",
    **{f"{OURS}, windows of {ms} ms": f"fixed, {ms} ms" for ms in ("0.5", 1, 2, 5, 10, 20)},
}
#: System of ``bench.scheduling.limits`` and how the page calls it.
LIMITS = {
    "as it is": "`slack` + `preemptive`",
    "told whom to give up": "the same, told whom to give up",
    "run times known": "told true run times",
    "run times known, suspending free": "told these, and suspending for free",
    "bound": "nobody can do better",
}


def of_systems(policies: Mapping[str, Any], systems: Mapping[str, str], head: str) -> str:
    """Share missed by ρ on the mix, and goodput."""
    missed = {
        (row["system"], row["rho"]): row["missed"]
        for row in policies["rows"]
        if row["workload"] == "mix"
    }
    reach = policies["goodput"]["mix"]
    rows = [
        [name, *(_share(missed[system, rho]) for rho in RHOS), f"{reach[system]:.2f}"]
        for system, name in systems.items()
    ]
    return markdown([f"{head}ρ {RHOS[0]:g}", *(f"{rho:g}" for rho in RHOS[1:]), "goodput"], rows)


def of_limits(limits: Mapping[str, Any]) -> str:
    """Goodput, its part of the bound's, and share missed at ρ 0.8, by workload."""
    of = {(row["system"], row["workload"]): row for row in limits["rows"]}
    workloads = list(dict.fromkeys(row["workload"] for row in limits["rows"]))

    def cells(system: str) -> Iterator[str]:
        for workload in workloads:
            row, best = of[system, workload], of["bound", workload]["goodput"]
            part = "" if system == "bound" else f" ({_share(row['goodput'] / best, 0)})"
            yield f"{row['goodput']:.2f}{part}, {_share(row['missed']['0.8'])}"

    return markdown(["", *workloads], [[name, *cells(system)] for system, name in LIMITS.items()])


def _share(share: float, digits: int = 1) -> str:
    return f"{share:.{digits}%}".replace("%", " %")


def written_into(page: str) -> str:
    """The page with the tables of today's results."""
    policies = read_result("policies")
    page = placed(page, "policies", of_systems(policies, SYSTEMS, "mix | "))
    page = placed(page, "windows", of_systems(policies, WINDOWS, "window | "))
    return placed(page, "limits", of_limits(read_result("limits")))


def main() -> None:
    PAGE.write_text(written_into(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
