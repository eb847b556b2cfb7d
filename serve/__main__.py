"""`python -m serve` is the `gnnserve` command."""

import os


def main() -> None:
    """Run the command in argv."""
    # Read when grpc is imported. Its handlers of a fork end its threads and start them again. This
    # process forks only to run programs, which takes no handlers; but where vfork fails for want of
    # threads, Python forks in its place, and threads that cannot start again are missed for good.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from serve.cli import main as run

    run()


if __name__ == "__main__":
    main()
