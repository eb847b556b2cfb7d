"""Tables of forward passes, estimates, sampling and memory."""

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from bench.kit.page import markdown, percent
from bench.kit.result import read_result

MODELS = {"gcn": "GCN", "sage": "GraphSAGE", "gin": "GIN", "gat": "GAT"}
KINDS = ("csr", "csr_compiled")


def executor_means() -> str:
    """Return geometric means of stock PyG's time ÷ each executor's."""
    found = read_result("executors")
    rows = [
        [
            f"`{kind}`",
            *(f"{found['ratios'][kind][shape]['geometric_mean']:.2f}"
              for shape in ("all", "small", "paper")),
            f"{min(row[kind]['ratio'] for row in found['rows']):.2f}",
            f"{max(row[kind]['ratio'] for row in found['rows']):.1f}",
        ]
        for kind in KINDS
    ]  # fmt: skip
    return markdown(["stock PyG ÷", "all", "3 × 64", "8 × 256", "lowest", "highest"], rows)


def executors() -> str:
    """Return times, ratios with their range, and peak memory by model and size."""
    rows = []
    for row in read_result("executors")["rows"]:
        if row["nodes"] in (100, 1_000, 8_000, 20_000):
            stock = row["stock"]
            rows.append([f"{row['model']} {row['shape']}", f"{row['nodes']:,}", _ms(stock["ms"])])
            for kind in KINDS:
                middle, low, high = (row[kind][n] for n in ("ratio", "ratio_low", "ratio_high"))
                rows[-1] += [_ms(row[kind]["ms"]), f"{middle:.1f} ({low:.1f}, {high:.1f})"]
            peaks = (row[kind]["peak_bytes"] / stock["peak_bytes"] for kind in KINDS)
            rows[-1].append(", ".join(f"{peak:.2f}" for peak in peaks))
    head = ["model", "nodes", "stock, ms", "`csr`, ms", "stock ÷ `csr`", "`csr_compiled`, ms"]
    return markdown([*head, "stock ÷ it", "peak memory ÷ stock's"], rows)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def merging() -> str:
    """Return the gain of eight merged requests, with quartiles, on `csr`."""
    found = {(row["model"], row["nodes"]): row for row in read_result("merging")["results"]}
    nodes = list(dict.fromkeys(count for _, count in found))

    def cell(row: Mapping[str, Any]) -> str:
        (eight,) = [one["apart_over_merged"] for one in row["rows"] if one["count"] == 8]
        low, middle, high = eight
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    rows = [[f"{count:,}", *(cell(found[model, count]) for model in MODELS)] for count in nodes]
    return markdown(["nodes", *MODELS.values()], rows)


def regrets(name: str) -> dict[str, tuple[float, float]]:
    """Return geometric mean and worst of the time ÷ the best way's, by decision."""
    found = [row["regret"] for row in read_result(name)["results"]]
    return {
        key: (geometric_mean(row[key] for row in found), max(row[key] for row in found))
        for key in ("chosen", "never", "always")
    }


def moldable() -> str:
    """Return the speed-up by a second core, geometric mean and range of the medians."""
    found = read_result("moldable")
    titles = {"idle": "the machine is idle", "second_core_busy": "the second core is busy"}

    def cell(rows: Sequence[Mapping[str, Any]]) -> str:
        middle = [row["speed_up"][1] for row in rows]
        return f"{geometric_mean(middle):.2f} ({min(middle):.2f} to {max(middle):.2f})"

    rows = [
        [title, *(cell([row for row in found[key] if row["executor"] == executor])
                  for executor in ("csr", "eager"))]
        for key, title in titles.items()
    ]  # fmt: skip
    return markdown(["", "`csr`", "`eager`"], rows)


def allocators() -> str:
    """Return processor time, page faults, and resident ÷ live memory by allocator setting."""
    ways = {
        "stock": "glibc's defaults",
        "32 MiB": "blocks to 32 MiB kept",
        "no mmap": "all kept",
        "huge pages": "all kept, huge pages",
    }
    found = {(r["model"], r["nodes"], r["way"]): r for r in read_result("allocators")["rows"]}

    def cell(row: Mapping[str, Any]) -> str:
        over = f", {row['pages_over_live']:.2f}" if "pages_over_live" in row else ""
        return f"{row['run_ms']:.1f} ms ({row['faults']:,.0f}){over}"

    cases = dict.fromkeys((model, nodes) for model, nodes, _ in found)
    rows = [[f"{m}, {n:,}", *(cell(found[m, n, way]) for way in ways)] for m, n in cases]
    return markdown(["model, nodes", *ways.values()], rows)


def pmc_by_graphs() -> str:
    """Return errors of memory estimates by kind of graph and by dataset."""
    names = {
        "to_largest": "to the largest that fits",
        "to_2000": "to 2,000 nodes",
        "with_loops": "with self-loops",
        "union": "unions of 2 to 16",
    }
    found = read_result("pmc_accuracy")
    rows = []
    for row in [*found["pools"], *found["by_dataset"]]:
        name = names.get(row.get("pool", ""), row.get("dataset", ""))
        worst = (row[key] or 0 for key in ("error_worst_of_four", "error_worst_of_linear"))
        rows.append([name, f"{row['runs']:,}", *(percent(error, 2) for error in worst),
                     str(row["underestimates"])])  # fmt: skip
    head = ["graphs", "runs", "GCN, SAGE, GIN, GAT", "the other linear models", "above reserve"]
    return markdown(head, rows)


def pmc_by_model() -> str:
    """Return errors of memory estimates by executor and kind of model."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in read_result("pmc_accuracy")["models"]:
        kind = "not linear in N and E (upper bound)" if row["warnings"] else "linear in N and E"
        name = MODELS.get(row["model"], kind)
        found.setdefault((row["executor"], name), []).append(row)
    rows = [_pmc_row(executor, name, group) for (executor, name), group in found.items()]
    head = ["executor", "models", "runs", "estimate ÷ measured − 1", "above reserve"]
    head += ["need ÷ reserve, at most", "resident ÷ reserve, at most"]
    return markdown([*head, "GNNSched's Table 2 × 1.1 (below need)"], rows)


def _pmc_row(executor: str, name: str, group: Sequence[Mapping[str, Any]]) -> list[str]:
    low = min(row["error_low"] or 0.0 for row in group)
    high = max(row["error_high"] or 0.0 for row in group)
    error = percent(high, 2) if high - low < 5e-5 else f"{percent(low, 2)} to {percent(high, 2)}"
    table_2 = "no formula"
    if group[0]["paper_error_low"] is not None:
        span = (min(r["paper_error_low"] for r in group), max(r["paper_error_high"] for r in group))
        below = sum(row["paper_underestimates"] for row in group)
        table_2 = f"{span[0]:+.0%} to {span[1]:+.0%} ({below:,})"
    return [
        f"`{executor}`",
        name,
        f"{sum(row['runs'] for row in group):,}",
        error,
        str(sum(row["underestimates"] for row in group)),
        f"{max(row['need_share_of_reserve_max'] for row in group):.3f}",
        f"{max(row['resident_share_of_reserve_max'] or 0.0 for row in group):.2f}",
        table_2,
    ]


def time_accuracy() -> str:
    """Return errors of run-time estimates: median and 95th percentile."""
    sizes = {"small": "3 × 64", "paper": "8 × 256"}
    found = read_result("time_accuracy")["models"]

    def cell(row: Mapping[str, Any], kind: str) -> str:
        return ", ".join(
            percent(row[f"{kind}_{name}"], 1 if row[f"{kind}_{name}"] < 0.1 else 0)
            for name in ("median", "p95")
        )

    rows = [
        [
            f"{MODELS[row['model']]} {sizes[row['size']]}",
            f"`{row['executor']}`",
            *(cell(row, kind) for kind in ("error", "corrected", "repeat")),
            str(row["recovery_runs"]),
        ]
        for row in sorted(found, key=lambda row: row["executor"] == "csr")
    ]
    head = ["model", "executor", "calibrated", "corrected by its runs", "machine itself"]
    return markdown([*head, "runs to follow a slow-down"], rows)


def sampling() -> str:
    """Return sampling rates, and other samplers' time ÷ ours with 5th and 95th percentile."""
    rows: dict[tuple[str, int], list[str]] = {}
    for row in read_result("sampling")["sampling"]:
        key = row["graph"], row["ids"]
        if row["sampler"] == "ours":
            rates = (f"{row[name] / 1e6:.0f} M" for name in ("nodes_per_s", "edges_per_s"))
            sampled = f"{row['nodes']:,.0f} / {row['edges']:,.0f}"
            rows[key] = [key[0], f"{key[1]:,}", sampled, f"{row['us']:,.0f}", " / ".join(rates)]
        else:
            rows[key].append(_range(row["time_over_ours"], 1))
    head = ["graph", "ids", "sampled nodes / edges", "µs", "nodes / edges a second"]
    return markdown([*head, "numpy's time ÷ ours", "DGL's time ÷ ours"], list(rows.values()))


def gathering() -> str:
    """Return the bandwidth of gathering, beside a plain copy and numpy."""
    rows = [
        [
            row["graph"],
            f"{row['ids']:,}",
            f"{row['gb_per_s']['ours']:.1f}",
            _range(row["ours_over_copy"], 2),
            f"{row['ours_over_numpy']['p50']:.2f}",
        ]
        for row in read_result("sampling")["gathering"]
    ]
    return markdown(["graph", "ids", "GB/s", "÷ a plain copy", "÷ `numpy.take`"], rows)


def _range(found: Mapping[str, float], digits: int) -> str:
    low, middle, high = (f"{found[name]:.{digits}f}" for name in ("p5", "p50", "p95"))
    return f"{middle} ({low} to {high})"


TABLES: dict[str, Callable[[], str]] = {
    "executor means": executor_means,
    "executors": executors,
    "merging": merging,
    "moldable": moldable,
    "allocators": allocators,
    "memory estimates by graphs": pmc_by_graphs,
    "memory estimates by model": pmc_by_model,
    "time estimates": time_accuracy,
    "sampling": sampling,
    "gathering": gathering,
}
