"""`python -m serve` is the `gnnserve` command."""

import os

from serve.collector import imports_uncollected


def main() -> None:
    """Run the command in argv."""
    # Read when grpc is imported. Its handlers of a fork end its threads and start them again. This
    # process forks only to run programs, which takes no handlers; but where vfork fails for want of
    # threads, Python forks in its place, and threads that cannot start again are missed for good.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # Otherwise grpc writes a line to stderr for every head that is too large and every handshake
    # that fails, and a client fills the log. What matters to the server, it reports itself.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with imports_uncollected():
        from serve.cli import main as run
    run()


if __name__ == "__main__":
    main()
