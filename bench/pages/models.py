"""Tables of forward passes, estimates and sampling."""

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from bench.kit.page import Row, flat, grid
from bench.kit.result import read_result

MODELS = {"gcn": "GCN", "sage": "GraphSAGE", "gin": "GIN", "gat": "GAT"}
SIZES = {"small": "3 × 64", "paper": "8 × 256"}
KINDS = ("csr", "csr_compiled")


def executor_means() -> str:
    """Return geometric means of stock PyG's time ÷ each executor's."""
    found = read_result("executors")
    rows = [
        {
            "kind": kind,
            **found["ratios"][kind],
            "each": [row[kind]["ratio"] for row in found["rows"]],
        }
        for kind in KINDS
    ]
    means = {
        title: f"{{{shape}[geometric_mean]:.2f}}"
        for shape, title in {"all": "all", **SIZES}.items()
    }
    return flat(rows, {
        "stock PyG ÷": "`{kind}`", **means,
        "lowest": lambda row: f"{min(row['each']):.2f}",
        "highest": lambda row: f"{max(row['each']):.1f}",
    })  # fmt: skip


def executors() -> str:
    """Return times, ratios with their range, and peak memory by model and size."""

    def ms(kind: str) -> Callable[[Row], str]:
        return lambda row: f"{row[kind]['ms']:,.{0 if row[kind]['ms'] >= 100 else 2}f}"

    def ratio(kind: str) -> str:
        return f"{{{kind}[ratio]:.1f}} ({{{kind}[ratio_low]:.1f}}, {{{kind}[ratio_high]:.1f}})"

    def peaks(row: Row) -> str:
        stock = row["stock"]["peak_bytes"]
        return ", ".join(f"{row[kind]['peak_bytes'] / stock:.2f}" for kind in KINDS)

    shown = [
        r for r in read_result("executors")["rows"] if r["nodes"] in (100, 1_000, 8_000, 20_000)
    ]
    return flat(shown, {
        "model": "{model} {shape}", "nodes": "{nodes:,}", "stock, ms": ms("stock"),
        "`csr`, ms": ms("csr"), "stock ÷ `csr`": ratio("csr"),
        "`csr_compiled`, ms": ms("csr_compiled"), "stock ÷ it": ratio("csr_compiled"),
        "peak memory ÷ stock's": peaks,
    })  # fmt: skip


def merging() -> str:
    """Return the gain of eight merged requests, with quartiles, on `csr`."""

    def cell(row: Row) -> str:
        (eight,) = [one["apart_over_merged"] for one in row["rows"] if one["count"] == 8]
        return "{1:.2f} ({0:.2f} to {2:.2f})".format(*eight)

    return grid(
        read_result("merging")["results"], ("nodes", "{:,}"), ("model", MODELS), cell, "nodes"
    )


def regrets(name: str) -> dict[str, tuple[float, float]]:
    """Return geometric mean and worst of the time ÷ the best way's, by decision."""
    found = [row["regret"] for row in read_result(name)["results"]]
    return {
        key: (geometric_mean(row[key] for row in found), max(row[key] for row in found))
        for key in ("chosen", "never", "always")
    }


def pmc_by_graphs() -> str:
    """Return errors of memory estimates by kind of graph and by dataset."""
    names = {
        "to_largest": "to the largest that fits",
        "to_2000": "to 2,000 nodes",
        "with_loops": "with self-loops",
        "union": "unions of 2 to 16",
    }
    found = read_result("pmc_accuracy")
    return flat([*found["pools"], *found["by_dataset"]], {
        "graphs": lambda row: names[row["pool"]] if "pool" in row else row["dataset"],
        "runs": "{runs:,}",
        "GCN, SAGE, GIN, GAT": lambda row: f"{row['error_worst_of_four'] or 0:.2%}",
        "the other linear models": lambda row: f"{row['error_worst_of_linear'] or 0:.2%}",
        "above reserve": "{underestimates}",
    })  # fmt: skip


def pmc_by_model() -> str:
    """Return errors of memory estimates by executor and kind of model."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in read_result("pmc_accuracy")["models"]:
        kind = "not linear in N and E (upper bound)" if row["warnings"] else "linear in N and E"
        name = MODELS.get(row["model"], kind)
        found.setdefault((row["executor"], name), []).append(row)
    rows = [_pmc_row(executor, name, group) for (executor, name), group in found.items()]
    return flat(rows, {
        "executor": "`{executor}`", "models": "{name}", "runs": "{runs:,}",
        "estimate ÷ measured − 1": "{error}", "above reserve": "{above}",
        "need ÷ reserve, at most": "{need:.3f}",
        "GNNSched's Table 2 × 1.1 (below need)": "{table_2}",
    })  # fmt: skip


def _pmc_row(executor: str, name: str, group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    low = min(row["error_low"] or 0.0 for row in group)
    high = max(row["error_high"] or 0.0 for row in group)
    table_2 = "no formula"
    if group[0]["paper_error_low"] is not None:
        span = (min(r["paper_error_low"] for r in group), max(r["paper_error_high"] for r in group))
        below = sum(row["paper_underestimates"] for row in group)
        table_2 = f"{span[0]:+.0%} to {span[1]:+.0%} ({below:,})"
    return {
        "executor": executor,
        "name": name,
        "runs": sum(row["runs"] for row in group),
        "error": f"{high:.2%}" if high - low < 5e-5 else f"{low:.2%} to {high:.2%}",
        "above": sum(row["underestimates"] for row in group),
        "need": max(row["need_share_of_reserve_max"] for row in group),
        "table_2": table_2,
    }


def time_accuracy() -> str:
    """Return errors of run-time estimates: median and 95th percentile."""

    def errors(kind: str) -> Callable[[Row], str]:
        names = (f"{kind}_median", f"{kind}_p95")
        return lambda row: ", ".join(
            f"{row[name]:.{1 if row[name] < 0.1 else 0}%}" for name in names
        )

    rows = read_result("time_accuracy")["models"]
    return flat(sorted(rows, key=lambda row: bool(row["executor"] == "csr")), {
        "model": lambda row: f"{MODELS[row['model']]} {SIZES[row['size']]}",
        "executor": "`{executor}`", "calibrated": errors("error"),
        "corrected by its runs": errors("corrected"), "machine itself": errors("repeat"),
        "runs to follow a slow-down": "{recovery_runs}",
    })  # fmt: skip


def gallery_accuracy() -> str:
    """Return errors of both estimates for models that declare their inputs."""
    return flat(read_result("gallery_accuracy")["models"], {
        "model": "{model}", "executor": "`{executor}`", "requests": "{requests}",
        "memory, median": "{memory_median:.2%}", "worst over 1 MB": "{memory_worst:.2%}",
        "below measured": "{below_measured}", "above reserve": "{above_reserve}",
        "need ÷ reserve, at most": "{need_share_of_reserve_max:.3f}",
        "time, calibrated": "{time_median:.1%}, {time_p95:.0%}",
        "corrected by its runs": "{corrected_median:.1%}, {corrected_p95:.0%}",
        "machine itself": "{repeat_median:.1%}",
    })  # fmt: skip


def padded_accuracy() -> str:
    """Return errors of memory estimates for models that pad the graphs of a batch."""
    return flat(read_result("padded_accuracy")["models"], {
        "model": "{model}", "requests": "{requests}", "runs": "{runs}",
        "memory, median": "{memory_median:.2%}", "lowest": "{memory_low:.2%}",
        "highest": "{memory_high:.2%}", "above reserve": "{above_reserve}",
        "need ÷ reserve, at most": "{need_share_of_reserve_max:.3f}",
        "without the sizes of graphs, lowest": "{counts_alone_low:.0%}",
    })  # fmt: skip


def sampling() -> str:
    """Return sampling rates, and other samplers' time ÷ ours with 5th and 95th percentile."""
    rows = [
        row | {"case": "{graph}, {ids:,} ids".format(**row), "who": row["sampler"].split()[0]}
        for row in read_result("sampling")["sampling"]
    ]

    def cell(row: Row) -> str:
        if row["who"] != "ours":
            return _range("time_over_ours", 1).format(**row)
        rates = (f"{row[name] / 1e6:.0f} M" for name in ("nodes_per_s", "edges_per_s"))
        return "{us:,.0f} µs, {nodes:,.0f} / {edges:,.0f}; ".format(**row) + " / ".join(rates)

    ways = {"ours": "ours: time, sampled nodes / edges; of each a second",
            "numpy": "numpy's time ÷ ours", "dgl": "DGL's time ÷ ours"}  # fmt: skip
    return grid(rows, ("case", "{}"), ("who", ways), cell, "graph")


def _range(name: str, digits: int) -> str:
    middle, low, high = (f"{{{name}[{q}]:.{digits}f}}" for q in ("p50", "p5", "p95"))
    return f"{middle} ({low} to {high})"


def coverage() -> str:
    """Return the classes of PyG that serve, by package."""
    rows = []
    for package in ("models", "conv"):
        of = [row for row in read_result("coverage")["rows"] if row["package"] == package]
        names = [_class(row) for row in of if row["serves"]]
        rows.append({"of": package, "told": f"{len(names)} of {len(of)}: {', '.join(names)}"})
    columns = {
        "`torch_geometric.nn`": "`{of}`",
        "serve (* also with a pair `x.0`, `x.1`)": "{told}",
    }
    return flat(rows, columns)


def _class(row: Row) -> str:
    return f"{row['name']}*" if row.get("bipartite") else str(row["name"])


def not_covered() -> str:
    """Return the reasons why classes of PyG do not serve, each with its classes."""
    by_reason: dict[str, list[str]] = {}
    for row in read_result("coverage")["rows"]:
        if not row["serves"]:
            by_reason.setdefault(row["told"], []).append(row["name"])
    rows = [{"of": ", ".join(names), "why": why} for why, names in by_reason.items()]
    return flat(rows, {"not as they are": "{of}", "why": "{why}"})


TABLES: dict[str, Callable[[], str]] = {
    "coverage": coverage,
    "not covered": not_covered,
    "executor means": executor_means,
    "executors": executors,
    "merging": merging,
    "training steps": lambda: flat(read_result("training_step")["rows"], {
        "model": "{model} {shape}", "nodes": "{nodes:,}", "PyG, ms": "{pyg_ms:.1f}",
        "`csr`, ms": "{csr_ms:.1f}",
        "PyG ÷ `csr`": "{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})",
    }),
    "forward passes after a step": lambda: grid(
        read_result("after_step")["rows"], ("nodes", "{:,} nodes"), ("model", "{}"),
        "{step_over_compute:.2f}",
    ),
    "memory estimates by graphs": pmc_by_graphs,
    "memory estimates by model": pmc_by_model,
    "time estimates": time_accuracy,
    "estimates of declared models": gallery_accuracy,
    "estimates of models that pad": padded_accuracy,
    "sampling": sampling,
    "gathering": lambda: flat(read_result("sampling")["gathering"], {
        "graph": "{graph}", "ids": "{ids:,}", "GB/s": "{gb_per_s[ours]:.1f}",
        "÷ a plain copy": _range("ours_over_copy", 2),
        "÷ `numpy.take`": "{ours_over_numpy[p50]:.2f}",
    }),
}  # fmt: skip
