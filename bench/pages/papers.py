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


def errors() -> str:
    """Return the extremes of GNNSched's Figure 9, ours and by its Table 2."""
    return flat(read_result("gnnsched_costs")["errors"], {
        "model": lambda row: row["model"].upper(),
        "subgraphs": "{graphs}",
        "the paper": "within {paper:.0%}",
        "here": "{low:+.2%} to {high:+.2%}",
        "Table 2 × 1.1": "{table_2_low:+.0%} to {table_2_high:+.0%}",
        "of these below the peak": "{table_2_below}",
    })  # fmt: skip


def costs() -> str:
    """Return what GNNSched's decisions cost, in thousandths of the run time."""
    return flat(read_result("gnnsched_costs")["costs"], {
        "load": "{load}",
        "system": lambda row: SYSTEMS[row["system"]],
        "the paper": "{paper_permille:.1f} ‰",
        "here": "{permille:.2f} ‰",
        "estimating": "{estimate_permille:.2f} ‰",
        "scheduling": "{schedule_permille:.2f} ‰",
        "inserting the buffer": "{insert_permille:.2f} ‰",
        "µs a request": "{us:.1f}",
    })  # fmt: skip


def matching() -> str:
    """Return the counts of TurboMGNN's operator matching."""
    return flat(read_result("turbomgnn")["mixes"], {
        "tasks": "{tasks}",
        "paper's figure": "{figure}",
        "operators of an iteration": "{operators}",
        "fused, by stages": "{aligned}",
        "matched": "{matched}",
        "matched in groups": "{in_groups}",
        "mean end of 500 iterations, by stages": "{end_aligned:,.2f}",
        "matched ": "{end_matched:,.2f}",
        "sooner by": "{sooner:.3f}",
        "the paper measures": lambda row: row["paper"] or "–",
    })  # fmt: skip


def contention() -> str:
    """Return when groups of tasks that slow one another end, by who runs beside whom."""
    return flat(read_result("turbomgnn")["mixes"], {
        "tasks": "{tasks}",
        "tasks of each group": lambda row: ", ".join(map(str, row["groups"])),
        "mean end in turn": "{in_turn:.2f}",
        "all side by side": "{side_by_side:.2f}",
        "by contention": "{by_contention:.2f}",
        "groups of each set": lambda row: ", ".join(map(str, row["sets"])),
    })  # fmt: skip


def fused() -> str:
    """Return how many times as fast one pass for several tasks is as a pass for each."""

    def gain(name: str) -> Callable[[Any], str]:
        return lambda row: f"{row[name][1]:.2f} ({row[name][0]:.2f}, {row[name][2]:.2f})"

    return flat(read_result("fused_pass")["rows"], {
        "graph": "{graph}",
        "case": "{case}",
        "F": "{width}",
        "tasks": "{parts}",
        "apart, ms": "{apart_ms:.2f}",
        "fused, by rows": gain("by_rows"),
        "in pairs": gain("in_pairs"),
        "in fours": gain("in_fours"),
        "put together": gain("together"),
        "worth it": lambda row: "yes" if row["worth"] else "no",
        "the paper, on a V100": lambda row: str(row["paper"] or "–"),
    })  # fmt: skip


def training() -> str:
    """Return the errors of the memory of training steps."""
    return flat(read_result("training_pmc")["models"], {
        "model": lambda row: row["model"].upper(),
        "steps": "{runs}",
        "traced": "{low:+.2%} to {high:+.2%}",
        "need ÷ reserve, at most": "{need_share:.3f}",
        "CoGNN's closed form": "{closed_low:+.0%} to {closed_high:+.0%}",
        "of these below the peak": "{closed_below}",
    })  # fmt: skip


def published() -> str:
    """Return CoGNN's closed form on the graph of its Figure 15."""
    return flat(read_result("training_pmc")["published"], {
        "model": lambda row: row["model"].upper(),
        "closed form, GiB": "{closed_gib:.2f}",
        "Figure 15, GiB": "{paper_gib:.1f}",
        "error": "{error:+.1%}",
    })  # fmt: skip


COGNN = {
    "default": "Default",
    "mps": "MPS",
    "pipeswitch": "PipeSwitch",
    "base": "CoGNN, Base",
    "lmcf": "CoGNN, LMCF",
    "bmc": "CoGNN, BMC",
    "lmcf, no groups": "LMCF without groups",
}
COGNN_DEVICES = {"occupancy": "by occupancy", "full": "full", "fitted": "fitted"}
COGNN_FIGURES = {"makespan": "makespan", "jct": "mean JCT", "qt": "mean QT"}


def queues() -> str:
    """Return CoGNN's Table V, means over its queues, with ours by device."""
    by_place = {(row["device"], row["system"]): row for row in read_result("cognn")["means"]}
    rows = [
        {
            "figure": words, "system": title,
            "paper": by_place["full", system].get(f"paper_{name}"),
            **{device: by_place[device, system][name] for device in COGNN_DEVICES},
        }
        for name, words in COGNN_FIGURES.items()
        for system, title in COGNN.items()
    ]  # fmt: skip
    return flat(rows, {
        "minutes": "{figure}", "": "{system}", "Table V": "{paper:.2f}",
        **{title: f"{{{device}:.2f}}" for device, title in COGNN_DEVICES.items()},
    })  # fmt: skip


def queue_ratios() -> str:
    """Return how many times as good as Default's the figures of LMCF are."""
    found = read_result("cognn")["ratios"]
    by_place = {(row["device"], row["queue"]): row for row in found}
    rows = [
        {
            "queue": queue, "figure": words, "paper": by_place["full", queue][f"paper_{name}"],
            **{device: by_place[device, queue][name] for device in COGNN_DEVICES},
        }
        for name, words in COGNN_FIGURES.items()
        if name != "makespan"
        for queue in dict.fromkeys(row["queue"] for row in found)
    ]  # fmt: skip
    return flat(rows, {
        "Default ÷ LMCF": "{figure}", "queue": "{queue}", "Table V": "{paper:.1f}",
        **{title: f"{{{device}:.1f}}" for device, title in COGNN_DEVICES.items()},
    })  # fmt: skip


def queue_groups() -> str:
    """Return the groups of CoGNN's Figure 14."""
    return flat(read_result("cognn")["groups"], {
        "policy": lambda row: COGNN[row["policy"]], "queue": "{queue}", "groups": "{count}",
        "in the paper": "{paper_count}", "largest, GiB": "{most_gib:.1f}",
        "in the paper ": "{paper_most_gib:.1f}",
        "largest with the factor": "{most_reserved_gib:.1f}",
        "a group ÷ the paper's": "{low:.2f} to {high:.2f}",
    })  # fmt: skip


def queue_costs() -> str:
    """Return CoGNN's Figure 13."""
    return flat(read_result("cognn_costs")["rows"], {
        "queue": "{queue}", "policy": lambda row: COGNN[row["policy"]],
        "an epoch, s": "{epoch_s:.2f}",
        "estimating, in the paper": "{paper_estimate:.1f}", "here": "{estimate:.1f}",
        "the closed form": "{closed_form:.4f}",
        "scheduling, in the paper": "{paper_schedule:.1f}", "here ": "{schedule:.4f}",
    })  # fmt: skip


def testbeds() -> str:
    """Return what DGTP saves beside DistDGL, the paper's first."""
    return flat(read_result("dgtp")["testbeds"], {
        "workers come together by": "{testbed}", "data": "{data}", "paper": "{paper:.1%}",
        "here, mean": "{mean:.1%}", "least to most": "{least:.1%} to {most:.1%}",
        "by placement alone": "{by_placement:.1%}", "run ÷ bound from below": "{of_least:.2f}",
    })  # fmt: skip


def clusters() -> str:
    """Return what DGTP saves on simulated clusters."""
    return flat(read_result("dgtp")["clusters"], {
        "data": "{data}", "case": "{case} {value:g}",
        "than DistDGL's placement": "{colocated:.1%}", "than OMCoflow": "{coflow:.1%}",
        "than MRTF": "{least_left:.1%}",
    })  # fmt: skip


def placement_search() -> str:
    """Return what a search for a placement takes."""
    return flat(read_result("dgtp")["search"], {
        "workers come together by": "{testbed}", "data": "{data}", "steps": "{steps:,}",
        "s of processor": "{search_s:.1f}", "placements run": "{run_count}",
        "run of one, ms": "{run_ms:.1f}",
    })  # fmt: skip


def placed_serving() -> str:
    """Return what placing stores, samplers and lanes gains."""
    return flat(read_result("dgtp_serving")["rows"], {
        "case": "{case}", "load carried, mean": "{mean:.2f} ×",
        "least to most": "{least:.2f} to {most:.2f} ×", "by pairs": "{by_pairs:.2f} ×",
        "rank correlation, mean": "{order:.2f}", "least": "{least_order:.2f}",
    })  # fmt: skip


def live_jobs() -> str:
    """Return how long placed jobs take live and simulated."""
    return flat(read_result("dgtp_live")["rows"], {
        "job": "{job}", "flows": "{flows}", "simulated, s": "{simulated_s:.2f}",
        "live, s": "{live_s:.2f}", "live ÷ simulated": "{ratio:.2f}",
    })  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "gnnsched worst": worst,
    "gnnsched headlines": headlines,
    "gnnsched grid": grid,
    "gnnsched errors": errors,
    "gnnsched costs": costs,
    "turbomgnn matching": matching,
    "turbomgnn contention": contention,
    "fused passes": fused,
    "training memory": training,
    "training memory published": published,
    "cognn queues": queues,
    "cognn ratios": queue_ratios,
    "cognn groups": queue_groups,
    "cognn costs": queue_costs,
    "dgtp testbeds": testbeds,
    "dgtp clusters": clusters,
    "dgtp search": placement_search,
    "dgtp serving": placed_serving,
    "dgtp live": live_jobs,
}
