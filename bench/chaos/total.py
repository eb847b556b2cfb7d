"""Adds up what the parts of a chaos run found, and those of earlier days.

    python -m bench.chaos.total FOLDER...

Each folder holds one part. A part that is in the result already is taken once.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from bench.kit.result import RESULTS, write_result

RESULT = RESULTS / "chaos.json"


def part_of(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the checks of a part, and the part as one row; raises OSError when it is not over."""
    findings = json.loads((folder / "verdict.json").read_text())
    end = json.loads((folder / "end.json").read_text())
    faults = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    done = Counter(one["name"] for one in faults if not one["said"].startswith("skipped"))
    skipped = {one["name"] for one in faults} - set(done)
    lives = [json.loads(line) for line in (folder / "lives.jsonl").read_text().splitlines()]
    row = {
        "part": f"{end['date']} {end['seed']}",
        "commit": end["commit"],
        "load_average": end["load_average"],
        "alone": end["alone"],
        "long_lives": end.get("long_lives", False),
        "restarts": len(lives) - 1,
        "killed": sum(one["how"] == "killed" for one in lives),
        "failed": [one["name"] for one in findings if not one["holds"]],
        "judged": [one["name"] for one in findings if one["judged"]],
        "figures": {one["name"]: one["figure"] for one in findings},
        "faults": dict(sorted(done.items())),
        "skipped": sorted(skipped),
    }
    checks = [{key: one[key] for key in ("name", "wanted", "adds")} for one in findings]
    return checks, row


def added(before: dict[str, Any], folders: list[Path]) -> dict[str, Any]:
    """Return a result with the parts of `before` and those in the folders, each once."""
    parts = {one["part"]: one for one in before.get("parts", [])}
    checks = before.get("checks", [])
    for folder in folders:
        checks, row = part_of(folder)
        parts[row["part"]] = row
    return {"checks": checks, "parts": [parts[name] for name in sorted(parts)]}


def sums(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each check: what all parts found together, or the worst of them."""
    parts = result["parts"]
    rows = []
    for check in result["checks"]:
        name = check["name"]
        judged = [one for one in parts if name in one["judged"]]
        figures = [one["figures"][name] for one in judged or parts if name in one["figures"]]
        # Of what should be large, the least is the worst.
        worst = min if check["wanted"].startswith("at least") else max
        figure = sum(figures) if check["adds"] else worst(figures, default=0)
        is_whole = figure == int(figure) or abs(figure) >= 100
        rows.append({
            "name": name,
            "wanted": check["wanted"],
            "found": f"{figure:,.0f}" if is_whole else f"{figure:,.2f}",
            "failed": sum(name in one["failed"] for one in parts),
            "judged": len(judged),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--anew", action="store_true", help="leave out the parts of earlier days")
    options = parser.parse_args()
    keeps = options.out.exists() and not options.anew
    before = json.loads(options.out.read_text()) if keeps else {}
    result = added(before, options.folders)
    write_result(options.out, result)
    failed = [part["part"] for part in result["parts"] if part["failed"]]
    print(f"{len(result['parts'])} parts, {len(failed)} of them with something that does not hold")


if __name__ == "__main__":
    main()
