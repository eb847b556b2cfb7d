"""Tables of simulated clusters."""

from collections.abc import Callable

from bench.kit.page import Row, flat, grid
from bench.kit.result import read_result


def _beside(row: Row) -> str:
    """Return what was missed, and in brackets what the prototype missed."""
    prototype = f" ({row['prototype']})" if row["prototype"] else ""
    return f"{row['missed']:.2%}{prototype}"


def alike() -> str:
    """Return the share missed by the way that requests are spread, and ρ."""
    return grid(
        read_result("routing")["alike"], ("way", "{}"), ("rho", "ρ {}"), _beside, "alike machines"
    )


def unlike() -> str:
    """Return the share missed by rule, and by how machines differ."""
    return grid(
        read_result("routing")["unlike"], ("way", "{}"), ("machines", "{}"), _beside, "rule"
    )


def goodput() -> str:
    """Return the highest ρ of one machine and of many."""
    return flat(read_result("routing")["goodput"], {
        "machines": "{machines}", "goodput": "{goodput:.2f} ({prototype})",
    })  # fmt: skip


def size() -> str:
    """Return what simulating many machines takes."""
    return flat(read_result("cluster_size")["rows"], {
        "machines": "{machines:,}", "fronts": "{fronts:,}", "requests": "{requests:,}",
        "missed": "{missed:.2%}", "µs of processor a request": "{us:.0f}", "MiB": "{mib:.0f}",
    })  # fmt: skip


def front() -> str:
    """Return what each way to two servers adds to the straight one."""
    added = "{added_us[0]:,.0f} ({added_us[1]:,.0f} to {added_us[2]:,.0f})"
    return flat(read_result("cluster_front")["rows"], {
        "request": "{size}", "way": "{way}", "p50, µs": "{p50:,.0f}", "p99, µs": "{p99:,.0f}",
        "added, µs": added, "processor, µs": "{cpu_us:,.0f}",
        "of it added": "{cpu_added_us[0]:,.0f}",
    })  # fmt: skip


def soak() -> str:
    """Return what became of the requests of the soak."""
    return flat(read_result("cluster_soak")["rows"], {
        "requests": "{requests:,}", "right": "{right:,}", "wrong": "{wrong}", "failed": "{failed}",
        "without or with two answers": "{not_once}", "kills": "{killed}", "freezes": "{frozen}",
        "stops": "{stopped}", "sent again": "{again}", "slowest": "{slowest_s:.1f} s",
    })  # fmt: skip


def rollout() -> str:
    """Return what became of the requests while servers were restarted and versions rolled out."""
    return flat(read_result("cluster_rollout")["rows"], {
        "meanwhile": "{phase}", "requests": "{requests:,}", "failed": "{failed}",
        "p50, ms": "{p50_ms:.2f}", "p99, ms": "{p99_ms:.2f}",
        "longest, ms": "{longest_ms:,.0f}", "steps took": "{steps_s:.0f} s",
    })  # fmt: skip


def partitions() -> str:
    """Return what requests fetch by how the graph is partitioned, and by their size."""
    return flat(read_result("partitions")["rows"], {
        "parts": "{parts}, {method}", "edges cut": "{cut_share:.0%}", "ids": "{ids}",
        "nodes": "{nodes:,.0f}", "elsewhere": "{remote_share:.0%}",
        "if 5 % are everywhere": "{cold_remote_share:.0%}", "KiB": "{remote_kib:,.1f}",
        "machines asked": "{asked:.1f}",
    })  # fmt: skip


def shared_hot_rows() -> str:
    """Return the share of rows that requests fetch by which copies servers keep."""
    return flat(read_result("shared_hot_rows")["rows"], {
        "asked for": "{asked_for}", "ids": "{ids}", "elsewhere": "{elsewhere[0]:.1%}",
        "by degree": "{by_degree[0]:.1%}",
        "by use": "{by_use[0]:.1%} ({by_use[1]:.1%} to {by_use[2]:.1%})", "best": "{best[0]:.1%}",
        "servers asked, by degree": "{asked_by_degree[0]:.2f}",
        "servers asked, by use": "{asked_by_use[0]:.2f}",
    })  # fmt: skip


def shared_topology() -> str:
    """Return how often requests wait for other servers where edges are shared out."""
    return flat(read_result("shared_topology")["rows"], {
        "parts": "{parts}", "everywhere": "{hot:.0%}", "memory": "{memory:.0%}", "ids": "{ids}",
        "fan-outs": "{fanouts}", "rounds, median": "{median:.0f}", "mean": "{mean:.2f}",
        "with push-down": "{pushed:.2f}", "features too": "{with_features:.2f}",
    })  # fmt: skip


def split_by_home() -> str:
    """Return what requests send, wait for and run where they are split by home, and where not."""
    return flat(read_result("shared_topology")["splits"], {
        "parts": "{parts}", "everywhere": "{hot:.0%}", "ids": "{ids}", "fan-outs": "{fanouts}",
        "rounds, off": "{off_rounds:.2f}", "home": "{home_rounds:.2f}",
        "KiB, off": "{off_kib:,.0f}", "KiB, home": "{home_kib:,.0f}",
        "of features only": "{of_features_only:.2f}", "longest run": "{run_share:.0%}",
        "nodes in all": "{work_share:.0%}",
    })  # fmt: skip


def shared_rows() -> str:
    """Return what features of other servers cost, by request, and by the link alone."""
    return flat(read_result("shared_rows")["rows"], {
        "what": "{what}", "key": "{key}", "rows elsewhere": "{elsewhere:,.0f}",
        "p50, ms": "{ms:.2f}", "p99, ms": "{p99_ms:.2f}", "from the whole graph": "{whole_ms}",
        "added": "{added_ms}", "processors, µs": "{cpu_us:,.0f}",
    })  # fmt: skip


def shared_lost() -> str:
    """Return what became of gathers that needed a server that was lost."""
    return flat(read_result("shared_faults")["lost"], {
        "a server is": "{what}", "its part has a replica": "{replica}", "gathers": "{gathers:,}",
        "failed": "{failed}", "first, ms": "{first_ms:.1f}", "slowest, ms": "{slowest_ms:.1f}",
    })  # fmt: skip


def shared_changed() -> str:
    """Return what gathers saw of changes on three servers."""
    return flat(read_result("shared_faults")["changed"], {
        "gathers": "{answers:,}", "changes": "{changes:,}", "of two versions": "{mixed}",
        "failed": "{failed}", "answered after, p50 ms": "{made_ms:.1f}",
        "seen by all after": "{seen_ms:.1f}",
        "p99": "{seen_p99_ms:.1f}", "gather, p50 ms": "{ms:.1f}", "p99 ms": "{p99_ms:.1f}",
    })  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "routing, alike": alike,
    "routing, unlike": unlike,
    "routing, goodput": goodput,
    "cluster size": size,
    "cluster front": front,
    "cluster soak": soak,
    "cluster rollout": rollout,
    "cluster partitions": partitions,
    "cluster shared hot rows": shared_hot_rows,
    "cluster shared topology": shared_topology,
    "cluster split by home": split_by_home,
    "cluster shared rows": shared_rows,
    "cluster shared lost": shared_lost,
    "cluster shared changed": shared_changed,
}
