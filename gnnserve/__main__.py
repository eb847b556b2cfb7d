"""The `gnnserve` command, also as ``python -m gnnserve``.

A plain `pip install gnnserve` is the client alone. A command that needs more says what to install.
"""

import sys

import gnnserve  # noqa: F401  it finds the package `serve`, whatever the current folder holds

#: The extras of pyproject.toml that a command needs; any other needs `server`.
_EXTRAS = {"load": "load", "demo": "server,load"}
_OURS = ("gnnserve", "loadgen", "serve")


def main() -> None:
    """Run the command in argv; end with exit code 2 when a package that it needs is missing."""
    try:
        from serve.__main__ import main as run

        run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in _OURS:
            raise
        command = sys.argv[1] if len(sys.argv) > 1 else ""
        extras = _EXTRAS.get(command, "server")
        raise SystemExit(_missing(f"gnnserve {command}".strip(), missing, extras)) from None


def _missing(command: str, module: str, extras: str) -> int:
    sys.stderr.write(
        f"error: `{command}` needs the Python package {module}, which is not installed;"
        f" run: pip install 'gnnserve[{extras}]'\n"
    )
    return 2


if __name__ == "__main__":
    main()
