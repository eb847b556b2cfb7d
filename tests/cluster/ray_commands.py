"""`gnnserve cluster`, in forks of a process that has imported Ray: each import takes two seconds.

    python -m tests.cluster.ray_commands

A line of standard input has the arguments of a command as JSON. Its line of standard output has the
exit code, and what the command wrote to standard output and to standard error.
"""

import json
import os
import signal
import sys
import tempfile
import traceback

from bench.kit.waiting import PATIENCE_S
from serve.__main__ import main as run
from serve.cluster import ray_control

__all__ = ["ray_control"]


def main():
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                os._exit(command(json.loads(line), out.fileno(), errors.fileno()))
            _, status = os.waitpid(child, 0)
            for file in (out, errors):
                file.seek(0)
            told = [os.waitstatus_to_exitcode(status), out.read(), errors.read()]
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def command(arguments, out, errors):
    """Run one; return its exit code."""
    signal.alarm(int(PATIENCE_S))
    os.dup2(out, 1)
    os.dup2(errors, 2)
    sys.argv = ["gnnserve", "cluster", *arguments]
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
