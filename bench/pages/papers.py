"""Tables about the papers' experiments."""

from collections.abc import Callable
from typing import Any

from bench.kit.page import flat
from bench.kit.result import read_result

SYSTEMS = {
    "default": "Default",
    "mps_base": "MPS-Base",
    "mps_aggr": "MPS-Aggr",
    "sqtf": "GNNSched, SQTF",
    "bqt": "GNNSched, BQT",
    "gnnserve": "gnnserve",
}
PAPER = "the paper"
DEVICES = {
    "cores": "two cores of this machine",
    "v100": "V100 by its published share",
    "implied": "implied by the paper's figures",
    "gpu": "the GPU measured",
}
FIGURES = {
    "latency_over_qt_p50": "median latency",
    "latency_over_qt_p90": "90th percentile of latency",
    "latency_over_qt_p99": "99th percentile of latency",
    "jct_over_qt_mean": "mean JCT",
}


def worst() -> str:
    """Return the largest share late at the high load, by device and system, the paper's first."""
    result = read_result("gnnsched")
    paper = {"device": PAPER, "rho": None, "gnnserve": None, **result["paper_worst"]}

    def share(name: str) -> Callable[[Any], str]:
        return lambda row: "" if row[name] is None else f"{row[name]:.0%}"

    return flat([paper, *result["worst"]], {
        "at the high load": lambda row: {**DEVICES, PAPER: PAPER}[row["device"]],
        "ρ": lambda row: "not told" if row["rho"] is None else f"{row['rho']:.2f}",
        **{title: share(name) for name, title in SYSTEMS.items()},
    })  # fmt: skip


def headlines() -> str:
    """Return how much lower GNNSched's figures are than its baselines'."""

    def lower(name: str) -> Callable[[Any], str]:
        return lambda row: (
            f"{row[name]:.1%}" if row[name] > 0 else f"{1 - row[name]:.1f} times as high"
        )

    rows = {(row["device"], row["figure"], row["against"]): row
            for row in read_result("gnnsched")["headlines"]}  # fmt: skip
    cases = [(figure, against) for device, figure, against in rows if device == "cores"]
    devices = [name for name in DEVICES if any(device == name for device, *_ in rows)]
    joined = [{name: rows[name, *case] for name in devices} for case in cases]

    def here(device: str) -> Callable[[Any], str]:
        return lambda row: lower("gnnsched")(row[device])

    return flat(joined, {
        "GNNSched lower by, on average": lambda row: FIGURES[row["cores"]["figure"]],
        "than": lambda row: SYSTEMS[row["cores"]["against"]],
        "paper": lambda row: lower("paper")(row["cores"]),
        **{DEVICES[name]: here(name) for name in devices},
    })  # fmt: skip


def grid() -> str:
    """Return the largest share late by what one task takes of a device and the slot's length."""
    return flat(read_result("gnnsched")["grid"], {
        "one task takes": "{share:.0%}", "slot ÷ mean solo time": "{slot:g}", "ρ": "{rho:.2f}",
        **{title: f"{{{name}:.0%}}" for name, title in SYSTEMS.items()},
    })  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "gnnsched worst": worst,
    "gnnsched headlines": headlines,
    "gnnsched grid": grid,
}
