"""Tables of what holds under chaos."""

from collections import Counter
from collections.abc import Callable

from bench.chaos.total import sums
from bench.kit.page import flat
from bench.kit.result import read_result

_BESIDE = "share in time beside a flood as a part of that without"


def _checks() -> str:
    result = read_result("chaos")
    parts = len(result["parts"])
    rows = [row | {"parts": parts} for row in sums(result)]
    return flat(rows, {
        "what": "{name}", "must be": "{wanted}",
        "was": lambda row: row["found"] if row["judged"] else _unjudged(row["found"]),
        "parts that failed": "{failed} of {judged}",
    })  # fmt: skip


def _unjudged(found: str) -> str:
    return "not judged" if found == "0" else f"{found}, not judged"


def _parts() -> str:
    rows = []
    for one in read_result("chaos")["parts"]:
        figures = {
            name: f"{one['figures'][name]:,.0f}" for name in ("requests", "answers compared")
        }
        rows.append(one | figures | {
            "code": one["commit"].rstrip("+"),
            "killed": one.get("killed", "not counted"),
            "lives": "long" if one.get("long_lives") else "any",
            "ends": one["restarts"] + 1,
            "load": f"{one['load_average'][1]:.0f}",
            "done": f"{sum(one['faults'].values()):,}",
            "beside": f"{one['figures'][_BESIDE]:.2f}",
            "bad": ", ".join(one["failed"]) or "nothing",
        })  # fmt: skip
    return flat(rows, {
        "commit": "{code}", "lives": "{lives}", "load of the machine": "{load}",
        "requests": "{requests}", "answers compared": "{answers compared}", "faults": "{done}",
        "ends of the main process": "{ends}", "by a kill": "{killed}",
        "share in time beside floods ÷ without": "{beside}", "did not hold": "{bad}",
    })  # fmt: skip


def _faults() -> str:
    done: Counter[str] = Counter()
    for one in read_result("chaos")["parts"]:
        done.update(one["faults"])
    rows = [{"name": name, "times": times} for name, times in sorted(done.items())]
    return flat(rows, {"fault": "{name}", "times": "{times:,}"})


TABLES: dict[str, Callable[[], str]] = {
    "chaos": _checks,
    "chaos parts": _parts,
    "chaos faults": _faults,
}
