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


TABLES: dict[str, Callable[[], str]] = {
    "routing, alike": alike,
    "routing, unlike": unlike,
    "routing, goodput": goodput,
}
