"""Entry of the processes that read files with torch: `python -m serve.lane.reader MODULE`."""

import sys
from importlib import import_module

from serve.lane.light_imports import imported_lightly


def main() -> None:
    """Have the module carry out the order that is read from stdin."""
    with imported_lightly():
        module = import_module(sys.argv[1])
    module.main()


if __name__ == "__main__":
    main()
