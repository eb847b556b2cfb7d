"""`python -m serve` is the `gnnserve` command."""

import os
import signal

from serve.collector import imports_uncollected

#: Exit code of a command that Ctrl-C ended, as of `serve.cli`.
_INTERRUPTED = 130


def main() -> None:
    """Run the command in argv."""
    # Read when grpc is imported. Its handlers of a fork end its threads and start them again. This
    # process forks only to run programs, which takes no handlers; but where vfork fails for want of
    # threads, Python forks in its place, and threads that cannot start again are missed for good.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # Otherwise grpc writes a line to stderr for every head that is too large and every handshake
    # that fails, and a client fills the log. What matters to the server, it reports itself.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # An import that Ctrl-C interrupts would tell where it was. There is nothing to end in order.
    ctrl_c = signal.getsignal(signal.SIGINT)
    raises = ctrl_c is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    with imports_uncollected():
        from serve.cli import main as run
    if raises:
        signal.signal(signal.SIGINT, ctrl_c)
    run()


if __name__ == "__main__":
    main()
