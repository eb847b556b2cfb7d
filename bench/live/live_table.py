"""The tables of docs/measurements/live.md on live runs, from what ``live`` and ``wakeups`` wrote.

    python -m bench.live.live_table

Replaces what stands between the markers; `tests/bench` checks that page and results agree.
"""

import textwrap
from typing import Any

from bench.kit.live_setup import OURS
from bench.kit.page import markdown, placed
from bench.kit.result import DOCS_PATH, read_result

PAGE = DOCS_PATH / "measurements" / "live.md"
#: Who takes processor time, as `bench.live.live` names them.
USERS = ("lanes", "server", "client")
#: By the marker in the page.
BENCHES = {"live": "live", "live eager": "live_eager"}


def section(content: dict[str, Any]) -> str:
    """What was sent, the table, and who took the processor while our system served."""
    seeds = len({row["seed"] for row in content["rows"]})
    solo = content["solo_ms"]
    sent = (
        f"{content['requests']} requests a load (half as many below ρ 0.2), "
        f"{seeds} seed{'s' if seeds > 1 else ''}; solo time in the server {solo['p50']:.1f} ms in "
        f"the middle, {solo['p95']:.1f} ms at 95 %:"
    )
    ours = [row for row in content["means"] if row["system"] == OURS]
    used = "; ".join(
        f"ρ {row['rho']:g} "
        + ", ".join(f"{row[f'cores_{who}']:.0%}".replace("%", " %") for who in USERS)
        for row in ours
    )
    told = f"Of all cores' time, with `slack` + `preemptive`, {', '.join(USERS)} took: {used}."
    hosts = "; ".join(
        f"ρ {row['rho']:g} "
        + ", ".join(f"{late:.1%}" for late in row["simulated_host"].values()).replace("%", " %")
        for row in ours
    )
    told += f" Simulated, if server and client took half of that, and nothing: {hosts}."
    return "\n".join((*textwrap.wrap(sent, 100), "", table(content), "", *textwrap.wrap(told, 100)))


def table(content: dict[str, Any]) -> str:
    """Markdown: a row per system, for each ρ live with its range, simulated and client."""
    means = content["means"]
    rhos = sorted({row["rho"] for row in means})
    cells = {(row["system"], row["rho"]): _cell(row) for row in means}
    heads = [f"ρ {rho:g}" for rho in rhos]
    heads[0] += ": live (seeds), simulated, client"
    lines = []
    for system in dict.fromkeys(row["system"] for row in means):
        name = " + ".join(f"`{part}`" for part in system.split("+"))
        lines.append([name, *(cells[system, rho] for rho in rhos)])
    return markdown(["system", *heads], lines)


def _cell(row: dict[str, Any]) -> str:
    low, high = row["late_server_range"]
    live, simulated, client = row["late_server"], row["simulated"], row["missed"]
    spread = f" ({low:.1%} to {high:.1%})" if low != high else ""
    return f"{live:.1%}{spread}, {simulated:.1%}, {client:.1%}".replace("%", " %")


def tails(content: dict[str, Any]) -> str:
    """Markdown: hand-over and answer of our system, live and simulated, a row for each ρ."""
    lines = []
    for row in content["means"]:
        if row["system"] == OURS:
            live, simulated = row["tails_ms"], row["simulated_tails_ms"]
            cells = (
                ", ".join(f"{of[stage][q]:.2f}" for q in of[stage])
                for stage in live
                for of in (live, simulated)
            )
            lines.append([f"{row['rho']:g}", *cells])
    heads = (
        f"{stage}, {how}" for stage in ("hand-over", "answer") for how in ("live", "simulated")
    )
    return markdown(["ρ", *heads], lines)


def wakeups(content: dict[str, Any]) -> str:
    """Markdown: how long the server waits for a core, a row for each niceness of the lane there."""
    rows = content["rows"]
    percent = [name[1:-3] for name in rows[0] if name.startswith("p") and name.endswith("_us")]
    lines = [
        [
            "no lane there" if row["niceness"] is None else str(row["niceness"]),
            *(f"{row[f'p{q}_us'] / 1000:.2f} ms" for q in percent),
        ]
        for row in rows
    ]
    return markdown(["niceness of the lane", *(f"{q} %" for q in percent)], lines)


def written_into(page: str) -> str:
    """The page with the tables of today's results."""
    for marker, name in BENCHES.items():
        page = placed(page, marker, section(read_result(name)))
    page = placed(page, "live tails", tails(read_result("live")))
    return placed(page, "wakeups", wakeups(read_result("wakeups")))


def main() -> None:
    PAGE.write_text(written_into(PAGE.read_text()))


if __name__ == "__main__":
    main()
