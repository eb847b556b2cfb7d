"""``python -m serve.obs.offline DATABASE html|json [SINCE_S]``: the report on standard output.

The HTTP port runs this as a process of its own, below the lanes' priority, so that making a
report takes no time from the requests being served.
"""

import os
import sys
from pathlib import Path

from serve.obs.cli_report import run_report


def main(arguments: list[str]) -> int:
    """Exit code of the report."""
    database, form = Path(arguments[0]), arguments[1]
    since_s = float(arguments[2]) if len(arguments) > 2 else None
    os.nice(10)
    if form == "json":
        return run_report(database, since_s, as_json=True)
    return run_report(database, since_s, html=Path("-"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
